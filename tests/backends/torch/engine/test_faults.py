"""Every call that may fail fails once: the n-th of them, for every n, while an answer is preempted and resumed.

And memory that really runs out: a program whose address space is limited loses one request and answers the next.
"""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.engine import engine as step
from agentspec.backends.torch.engine import scheduler as planning
from agentspec.backends.torch.engine.cache_session import CacheSession
from agentspec.backends.torch.engine.engine import Engine
from agentspec.backends.torch.engine.prefix_cache import PrefixCache
from agentspec.backends.torch.engine.scheduler import Scheduler
from agentspec.backends.torch.engine.sequence import EngineContext, EngineRequest
from agentspec.backends.torch.engine.sequence import Sequence as EngineSequence
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.errors import EngineError, EngineStoppedError
from agentspec.types import Delta, GenerateRequest, SamplingParams
from tests.backends.torch.engine.conftest import tighten

WAIT = 60.0
PROMPT = list(range(20, 40))
LATER = [9, 8, 7, *PROMPT]
ROOM = 139  # slots: for one answer as it grows, and another as it begins
PHASES: list[tuple[Any, str]] = [
    (TargetModel, "forward_batch"), (TargetModel, "new_cache"), (SequenceCache, "update"), (SequenceCache, "commit"),
    (SequenceCache, "rows"), (SequenceCache, "joined"), (PrefixCache, "find"), (PrefixCache, "keep"),
    (Sampler, "begin"), (Sampler, "choose"), (EngineSequence, "commit"), (EngineSequence, "proposing"),
    (Scheduler, "allocate"), (planning, "plan_step"), (step, "fetch"), (step, "synchronize"),
    (step, "allocate_draft_budget"),
]  # fmt: skip


class Faults:
    """Raises `error` in the n-th of the calls to any of the phases."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls, self.at, self.error = 0, 0, Exception()
        for owner, name in PHASES:
            patch.setattr(owner, name, self._wrapped(owner, name))

    def _wrapped(self, owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                raise self.error
            return original(*args, **kwargs)

        return staticmethod(call) if isinstance(vars(owner)[name], classmethod) else call

    def start(self, at: int, error: Exception) -> None:
        self.calls, self.at, self.error = 0, at, error


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


Outcome = list[int] | Exception


class Scene:
    """A long answer, and an urgent one that needs its memory soon after; both then read one prompt again."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._asked = engine, dict[EngineRequest, queue.Queue[Delta | Exception]]()
        self._submitted = set[EngineRequest]()

    def play(self) -> list[Outcome]:
        slow = self._request(PROMPT, 12, priority=5)
        urgent = self._request(LATER, 4, priority=0)
        heard = slow.deliver

        def deliver(item: Delta | Exception) -> None:
            slow.deliver = heard
            heard(item)
            if not isinstance(item, Exception):
                self._submit(urgent)

        slow.deliver = deliver
        self._submit(slow)
        first = self._outcome(slow)
        if urgent not in self._submitted:
            self._submit(urgent)
        return [first, self._outcome(urgent)]

    def after(self) -> Outcome:
        request = self._request(PROMPT, 5)
        self._submit(request)
        return self._outcome(request)

    def _submit(self, request: EngineRequest) -> None:
        self._submitted.add(request)
        try:
            self._engine.submit(request)
        except EngineError as error:
            self._asked[request].put(error)

    def _request(self, prompt: list[int], max_tokens: int, **params: Any) -> EngineRequest:
        told: queue.Queue[Delta | Exception] = queue.Queue()
        original = GenerateRequest("m", token_ids=prompt, sampling=SamplingParams(temperature=0), **params)
        request = EngineRequest(original, prompt, max_tokens, frozenset(), None, told.put)
        self._asked[request] = told
        return request

    def _outcome(self, request: EngineRequest) -> Outcome:
        tokens: list[int] = []
        while True:
            item = self._asked[request].get(timeout=WAIT)
            if isinstance(item, Exception):
                return item
            tokens += item.token_ids
            if item.finish_reason:
                return tokens


@pytest.fixture
def engine_of(lab: Any) -> Iterator[Callable[[], Engine]]:
    engines: list[Engine] = []

    def make() -> Engine:
        context = EngineContext(lab.target, lab.tokenizer)
        engines.append(Engine(context, TorchSettings(max_active=2), lambda request: CacheSession(None)))
        tighten(engines[-1], ROOM)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


ERRORS = [MemoryError("no room"), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("odd shapes")]


@pytest.mark.parametrize("every", [31, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_at_any_place_fails_requests_but_never_the_engine(
    lab: Any, engine_of: Any, faults: Faults, error: Exception, every: int
) -> None:
    wants = [lab.oracle(prompt, SamplingParams(temperature=0), max_tokens=length, stop_ids=()) for prompt, length in (
        (PROMPT, 12), (LATER, 4), (PROMPT, 5)
    )]  # fmt: skip
    at, failed = 1, 0
    while True:
        engine = engine_of()
        scene = Scene(engine)
        faults.start(at, error)
        outcomes = scene.play()
        reached = faults.calls >= at
        faults.start(0, error)
        for got, want in zip([*outcomes, scene.after()], wants, strict=True):
            assert got == want or (isinstance(got, EngineError) and got.__cause__ is error), f"call {at}: {got}"
        assert scene.after() == wants[2] and engine.failure is None
        assert not engine.scheduler.has_work and engine.scheduler.kv_slots == 0
        failed += engine.context.counters.failed
        assert engine.context.counters.preempted or not all(isinstance(got, list) for got in outcomes)
        engine.close()
        if not reached:
            break
        at += every
    assert at > 100 and failed > 3


@pytest.mark.parametrize("every", [47, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("device-side assert"), RuntimeError("CUDA error: an illegal memory access")]
)
def test_an_error_of_the_device_at_any_place_ends_the_engine_and_leaves_nobody_waiting(
    engine_of: Any, faults: Faults, error: Exception, every: int
) -> None:
    at = 1
    while True:
        engine = engine_of()
        scene = Scene(engine)
        faults.start(at, error)
        outcomes = scene.play()
        reached = faults.calls >= at
        faults.start(0, error)
        if not reached:
            break
        last = scene.after()
        assert isinstance(last, EngineStoppedError) and engine.failure is not None, (
            f"call {at}: {last} after {outcomes}"
        )
        assert all(isinstance(got, (list, EngineError)) for got in outcomes)
        engine.close()
        at += every
    assert at > 100


def test_a_preempted_answer_goes_on_without_its_rows_where_they_cannot_be_copied(
    lab: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    monkeypatch.setattr(PrefixCache, "find", lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    first, second = Scene(engine).play()
    want = lab.oracle(PROMPT, SamplingParams(temperature=0), max_tokens=12, stop_ids=())
    assert first == want and isinstance(second, list)
    assert engine.context.counters.preempted == 1 and engine.context.counters.failed == 0


PROGRAM = """
import asyncio, resource, sys
import torch
from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.errors import AgentSpecError
from agentspec.types import GenerateRequest, SamplingParams

torch.set_num_threads(1)
LENGTH, ROOM = 100_000, 200 << 20


async def answer(backend, prompt):
    request = GenerateRequest("m", token_ids=prompt, sampling=SamplingParams(temperature=0, max_tokens=4))
    return [token async for delta in backend.generate(request) for token in delta.token_ids]


async def main():
    backend = TorchBackend.load(TorchSettings(model=sys.argv[1], device="cpu"))
    before = await answer(backend, [1, 2, 3])
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, -1))
    try:
        await answer(backend, [1] * LENGTH)
        print("no error")
    except AgentSpecError as error:
        print("error:", error)
    assert await answer(backend, [1, 2, 3]) == before
    assert backend.stats().failed == 1
    print("answered again")
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))  # to end, a process may need a thread
    await backend.aclose()


asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits the address space as Linux does")
def test_a_request_too_large_for_the_memory_fails_alone(tmp_path: Path, byte_tokens: object) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=512, intermediate_size=32, num_hidden_layers=1, num_attention_heads=8,
        max_position_embeddings=1 << 20, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokens.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.strip().splitlines()[-2:]
    assert first.startswith("error:") and "memory" in first and second == "answered again"
