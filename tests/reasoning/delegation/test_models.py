"""The default model, in process, in every role."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.protocol.speculation import StepSpeculation
from agentspec.reasoning.settings import LookaheadSettings, SpecReasonSettings, SpeculativeThinkingSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.types import Delta, GenerateRequest, SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.model]
pytest.importorskip("torch")

LONG = pytest.mark.long

COMMON = {"think_start": "", "think_end": "", "budget_tokens": 48, "step_tokens": 16}
STRATEGIES = {
    "all": SpecReasonSettings(base="base", small="small", threshold=0, **COMMON),  # type: ignore[arg-type]
    "none": SpecReasonSettings(base="base", small="small", threshold=9.5, **COMMON),  # type: ignore[arg-type]
    "some": SpecReasonSettings(base="base", small="small", threshold=4, **COMMON),  # type: ignore[arg-type]
    "led by the base model": SpeculativeThinkingSettings(base="base", small="small", small_reasons=False, **COMMON),  # type: ignore[arg-type]
    "one model": SpecReasonSettings(base="small", small="small", threshold=0, **COMMON),  # type: ignore[arg-type]
    "lookahead": LookaheadSettings(base="base", small="small", depth=2, **COMMON),  # type: ignore[arg-type]
}


def problems() -> list[str]:
    lines = (Path(__file__).parent / "problems.jsonl").read_text().splitlines()
    return [json.loads(line)["problem"] for line in lines]


def ask(model: str, problem: str) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=64)
    return GenerateRequest(model, messages=[{"role": "user", "content": problem}], sampling=sampling)


@pytest.fixture(scope="module")
async def runtime(default_model: object) -> AsyncIterator[Runtime]:
    backends = {"small": TorchSettings(), "base": TorchSettings()}
    async with Runtime(Settings(backends=backends, models=STRATEGIES)) as started:  # type: ignore[arg-type]
        yield started


async def deltas(runtime: Runtime, request: GenerateRequest) -> list[Delta]:
    return [delta async for delta in runtime.generate(request)]


def thought(found: list[Delta]) -> str:
    return "".join(delta.extra.get("reasoning", "") for delta in found)


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param(one, marks=LONG) if one == "all" else one for one in STRATEGIES])
async def test_every_strategy_thinks_and_answers(runtime: Runtime, model: str) -> None:
    found = await deltas(runtime, ask(model, problems()[0]))
    figures, usage = found[-1].speculation, found[-1].usage
    assert isinstance(figures, StepSpeculation) and usage is not None and figures.degraded == {}
    assert thought(found).strip() and 0 < usage.completion_tokens <= 64
    assert sum(figures.kept_tokens.values()) <= 48
    if model in ("all", "none", "one model"):
        assert figures.accepted_steps == (0 if model == "none" else figures.proposed_steps)
