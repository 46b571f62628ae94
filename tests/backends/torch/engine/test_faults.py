"""Every call that may fail fails once: the n-th of them, for every n, while two answers are computed together.

And memory that really runs out: a program whose address space is limited loses one request and answers the next.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.errors import EngineError, EngineStoppedError
from agentspec.types import GenerateRequest, SamplingParams

GREEDY = SamplingParams(temperature=0)
PROMPT = list(range(20, 40))
LATER = [9, 8, 7, *PROMPT]
PHASES = (
    "model.target.TargetModel.forward_batch", "model.target.TargetModel.new_cache",
    "model.kv_cache.SequenceCache.update", "model.kv_cache.SequenceCache.commit", "model.kv_cache.SequenceCache.rows",
    "model.kv_cache.SequenceCache.joined", "engine.prefix_cache.PrefixCache.find",
    "engine.prefix_cache.PrefixCache.keep", "engine.sequence.Sequence.commit", "engine.sequence.Sequence.propose",
    "engine.scheduler.Scheduler.allocate", "engine.scheduler.plan_step", "engine.engine.fetch",
    "engine.engine.synchronize", "engine.engine.allocate_draft_budget", "sampling.sampler.Sampler.begin",
    "sampling.sampler.Sampler.choose",
)  # fmt: skip


class Faults:
    """Raises `error` in the n-th of the calls to any of the phases, which only a patch can do at every place."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls, self.at, self.error = 0, 0, Exception()
        for phase in PHASES:
            owner, _, name = phase.rpartition(".")
            patch.setattr(*self._wrapped(resolve_name(f"agentspec.backends.torch.{owner}"), name))

    def _wrapped(self, owner: Any, name: str) -> tuple[Any, str, Any]:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                raise self.error
            return original(*args, **kwargs)

        return owner, name, staticmethod(call) if isinstance(vars(owner)[name], classmethod) else call

    def start(self, at: int, error: Exception) -> None:
        self.calls, self.at, self.error = 0, at, error


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


Outcome = list[int] | Exception


async def ask(backend: TorchBackend, prompt: list[int], max_tokens: int, begun: asyncio.Event | None = None) -> Outcome:
    sampling, tokens = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), list[int]()
    try:
        async for delta in backend.generate(GenerateRequest("m", token_ids=prompt, sampling=sampling)):
            tokens += delta.token_ids
            if begun is not None:
                begun.set()
    except EngineError as error:
        return error
    finally:
        if begun is not None:
            begun.set()
    return tokens


async def play(backend: TorchBackend) -> list[Outcome]:
    """An answer, and another that joins it once it has begun."""
    begun = asyncio.Event()
    first = asyncio.ensure_future(ask(backend, PROMPT, 12, begun))
    await begun.wait()
    return [*await asyncio.gather(first, ask(backend, LATER, 4))]


ERRORS = [MemoryError("no room"), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("odd shapes")]


@pytest.mark.anyio
@pytest.mark.parametrize("every", [19, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_an_error_in_any_call_fails_requests_but_never_the_engine(
    lab: Any, faults: Faults, error: Exception, every: int
) -> None:
    want = partial(lab.oracle, sampling=GREEDY, stop_ids=())
    wants = [want(PROMPT, max_tokens=12), want(LATER, max_tokens=4), want(PROMPT, max_tokens=5)]
    at, failed, reached = 1, 0, True
    while reached:
        backend = TorchBackend(lab.loaded, TorchSettings(max_active=2))
        faults.start(at, error)
        outcomes = await play(backend)
        reached = faults.calls >= at
        faults.start(0, error)
        for got, answer in zip([*outcomes, await ask(backend, PROMPT, 5)], wants, strict=True):
            assert got == answer or (isinstance(got, EngineError) and got.__cause__ is error), f"call {at}: {got}"
        assert await ask(backend, PROMPT, 5) == wants[2] and backend.failure is None
        stats = backend.stats()
        assert (stats.active, stats.queued, stats.kv_rows) == (0, 0, 0)
        assert "no room" not in str(outcomes) and stats.failed == sum(not isinstance(got, list) for got in outcomes)
        failed += stats.failed
        await backend.aclose()
        at += every
    assert at > 100 and failed > 3


@pytest.mark.anyio
@pytest.mark.parametrize("every", [47, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("device-side assert"), RuntimeError("CUDA error: an illegal memory access")]
)
async def test_a_device_error_in_any_call_ends_the_engine_and_every_answer(
    lab: Any, faults: Faults, error: Exception, every: int
) -> None:
    at = 1
    while True:
        backend = TorchBackend(lab.loaded, TorchSettings(max_active=2))
        faults.start(at, error)
        outcomes = await play(backend)
        reached = faults.calls >= at
        faults.start(0, error)
        if reached:
            last = await ask(backend, PROMPT, 5)
            assert isinstance(last, EngineStoppedError) and backend.failure is not None, f"call {at}: {last}"
            assert all(isinstance(got, (list, EngineError)) for got in outcomes)
        await backend.aclose()
        if not reached:
            break
        at += every
    assert at > 80


@pytest.mark.anyio
async def test_a_request_that_no_forward_can_compute_fails_alone(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of all fails with it, and each is then tried alone."""
    backend, forward = TorchBackend(lab.loaded, TorchSettings()), type(lab.target).forward_batch

    def breaking(target: Any, items: Any) -> Any:
        if any(250 in item.tokens for item in items):
            raise RuntimeError("out of something")
        return forward(target, items)

    monkeypatch.setattr(type(lab.target), "forward_batch", breaking)
    prompts = [[1, 2, 3], PROMPT, [1, 250, 3], LATER]
    outcomes = await asyncio.gather(*(ask(backend, prompt, 6) for prompt in prompts))
    for prompt, got in zip(prompts, outcomes, strict=True):
        if 250 in prompt:
            assert isinstance(got, EngineError) and "something" not in str(got)
        else:
            assert got == lab.oracle(prompt, GREEDY, max_tokens=6, stop_ids=())
    await backend.aclose()


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
