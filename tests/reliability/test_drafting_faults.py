"""U10 and U11: whatever drafts may fail or hang; the answer comes from the target model, and is the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import numpy as np
import pytest

from agentspec.backends.base import Backend
from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.backends.torch.drafters.base import Drafter
from agentspec.cache import SuffixCache
from agentspec.errors import UpstreamError, UpstreamTimeoutError
from agentspec.reasoning.settings import LookaheadSettings, SpecReasonSettings, SpeculativeThinkingSettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.testing import FakeBackend
from agentspec.types import Draft, GenerateRequest, Namespace, SamplingParams, Source
from tests.thinking_model import ThinkingModel, having

pytestmark = pytest.mark.reliability

STRATEGIES = {
    "specreason": SpecReasonSettings(base="large", small="tiny", judge="critic"),
    "speculative_thinking": having(SpeculativeThinkingSettings, answer_marks=("Answer:",))(base="large", small="tiny"),
    "lookahead": having(LookaheadSettings, answer_marks=("Answer:",))(base="large", small="tiny", judge="critic"),
}
BODY = {"model": "fast", "messages": [{"role": "user", "content": "Two plus two?"}]}
ALONE = "base 1.\n\nbase 2. Answer: 4\n\n"
"""The thinking of the base model without help."""


def numbered(word: str) -> Callable[[str], str]:
    def next_step(thinking: str) -> str:
        number = thinking.count("\n\n") + 1
        return f"{word} {number}.{' Answer: 4' if number == 2 else ''}\n\n"

    return next_step


def settings(strategy: Any) -> Settings:
    backends: dict[str, Any] = {name: TorchSettings(model=name) for name in ("large", "tiny", "critic")}
    return Settings(backends=backends, models={"fast": strategy, "plain": ModelSettings(backend="large")})


def down(fault: str) -> Backend:
    """A model that cannot be reached, or fails whenever it is asked."""
    if fault == "refused":
        return OpenAIBackend(OpenAISettings(base_url="http://127.0.0.1:9/v1", model="m"))  # type: ignore[arg-type]
    errors: dict[str, Exception] = {
        "failing": UpstreamError("gone"),
        "silent": UpstreamTimeoutError("silent"),
        "broken": OSError("canary"),
    }
    return FakeBackend(errors[fault])


FAULTS = ["refused", "failing", "silent", "broken"]
FIRST = ("specreason", "small")
HELPERS = {"specreason": ("small", "judge"), "speculative_thinking": ("small",), "lookahead": ("small", "judge")}


@pytest.mark.parametrize(
    ("strategy", "role", "fault"),
    [
        *(("specreason", "small", fault) for fault in FAULTS),
        *((name, role, "failing") for name, roles in HELPERS.items() for role in roles if (name, role) != FIRST),
    ],
)
def test_u10_without_a_helping_model_the_base_model_answers(gateway: Any, strategy: str, role: str, fault: str) -> None:
    words = {"large": "base", "tiny": "small", "critic": "critic"}
    models: dict[str, Any] = {name: ThinkingModel(numbered(word)) for name, word in words.items()}
    models[{"small": "tiny", "judge": "critic"}[role]] = down(fault)
    running = gateway(models, settings(STRATEGIES[strategy]))
    for _ in range(2):
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=BODY).json()
        message, speculation = answer["choices"][0]["message"], answer["speculation"]
        assert (message["content"], message["reasoning"]) == ("The answer is four.", ALONE)
        assert set(speculation["degraded"]) == {role} and "canary" not in str(speculation)
    assert running.metric("agentspec_speculation_off_total", model="fast", reason=f"{role}_failed") == 2


# The local engine and its token cache.

PROMPT = list(b"the same thing again and again, the same thing again")
REQUEST = GenerateRequest("tiny", token_ids=PROMPT, sampling=SamplingParams(temperature=0, max_tokens=12))


class Fault:
    """A token cache whose requests act in one method before they do what they should."""

    def __init__(self, method: str, action: Callable[[], None]) -> None:
        self.method, self.action, self.calls = method, action, 0
        self.cache = SuffixCache.open()
        self.on_forget, self.close = self.cache.on_forget, self.cache.close

    def request(self, *args: Any, **options: Any) -> Any:
        if self.method == "request":
            self.act()
        opened = self.cache.request(*args, **options)
        if self.method != "request":
            original = getattr(opened, self.method)
            setattr(opened, self.method, lambda *a, **o: (self.act(), original(*a, **o))[1])
        return opened

    def act(self) -> None:
        self.calls += 1
        self.action()


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> Any:
    pytest.importorskip("torch")
    from agentspec.backends.torch.loader import load

    return load(TorchSettings(model=str(tiny_model), device="cpu"))


def generate(loaded: Any, cache: Any, count: int = 1) -> tuple[list[list[int]], Any]:
    """The answers to `REQUEST`, one after another, and the engine's counts."""
    from agentspec.backends.torch import TorchBackend

    async def run() -> tuple[list[list[int]], Any]:
        backend = TorchBackend(loaded, TorchSettings(), cache)
        try:
            answers = [[t async for delta in backend.generate(REQUEST) for t in delta.token_ids] for _ in range(count)]
            return answers, backend.stats()
        finally:
            await backend.aclose()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def plain(loaded: Any) -> list[int]:
    """The answer without any cache."""
    answers, _ = generate(loaded, None)
    return answers[0]


METHODS = ["request", "draft", "extend", "close"]


def crash() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("method", METHODS)
def test_u11_a_cache_that_raises_costs_drafts_only(loaded: Any, plain: list[int], method: str) -> None:
    with closing(Fault(method, crash)) as fault:
        answers, stats = generate(loaded, fault, count=2)
        assert answers == [plain, plain] and fault.calls >= 2 and stats.failed == 0


@pytest.mark.parametrize("method", METHODS)
def test_u11_a_cache_that_hangs_is_asked_once_and_then_left_alone(
    loaded: Any, plain: list[int], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]  # it stands still but for the call that hangs: on a busy machine any call may take long

    def hang() -> None:
        now[0] += 3

    monkeypatch.setattr("agentspec.backends.torch.engine.cache_session.perf_counter", lambda: now[0])
    with closing(Fault(method, hang)) as fault:
        answers, _ = generate(loaded, fault, count=2)
        assert answers == [plain] * 2 and fault.calls == 1


def test_u11_a_cache_that_has_recovered_is_used_again(
    loaded: Any, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STALL_SECONDS", "PAUSE_SECONDS"):
        monkeypatch.setattr(f"agentspec.backends.torch.engine.cache_session.{name}", 0.0)
    with closing(Fault("draft", lambda: None)) as fault:
        answers, stats = generate(loaded, fault, count=3)
        assert answers == [plain] * 3 and fault.calls > 3 and sum(stats.accepted_by_source.values()) > 0


class Broken(Drafter):
    """A draft model that is gone."""

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        raise RuntimeError("the draft model is gone")


def test_u10_a_draft_model_that_fails_costs_drafts_only(
    loaded: Any, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.backends.torch.engine.sequence.SuffixDrafter", lambda *_: Broken())
    answers, stats = generate(loaded, None, count=2)
    assert answers == [plain, plain] and stats.failed == 0 and stats.draft_failures == 2


# An index that another thread holds.


def test_u11_a_draft_does_not_wait_for_an_index_that_is_being_deleted_from() -> None:
    """Sooner or later a draft falls into a deletion: it then has no token of the shared index, and came anyway."""
    text = np.arange(1, 1001, dtype=np.int32)
    with SuffixCache.open(memory_bytes=1 << 30) as cache:
        request = cache.request(text[:20], namespace=Namespace("t"), store=False)
        shared, skipped, limit = request.indexes[1][0], 0, monotonic() + 60
        while not skipped and monotonic() < limit:
            for number in range(200):
                shared.append(number, text)
            assert Source.SHARED in request.draft(8, patience=60.0).source
            deleting = threading.Thread(target=shared.remove, args=(np.arange(200),))
            deleting.start()
            while deleting.is_alive():
                skipped += Source.SHARED not in request.draft(8, patience=0.001).source
            deleting.join()
        assert skipped > 0
