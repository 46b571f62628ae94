"""`spend_tokens` ends a delegation that runs away, and a request's own budget ends any."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from agentspec.protocol.speculation import StepSpeculation
from agentspec.reasoning.delegation.steps import Ended, Event
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.settings import (
    DelegationSettings,
    LookaheadSettings,
    SpecReasonSettings,
    SpeculativeThinkingSettings,
)
from agentspec.testing import Answer, Script
from agentspec.types import Delta, GenerateRequest
from tests.fakes import delegating
from tests.thinking_model import ThinkingModel

NAMED: dict[str, Any] = {"base": "base", "small": "small"}
ASKED = GenerateRequest("fast", messages=[{"role": "user", "content": "?"}])


def lookahead(depth: int, **given: Any) -> LookaheadSettings:
    return LookaheadSettings(**NAMED, depth=depth, **given)


def steps(name: str, most: int = 12) -> Callable[[str], str]:
    """A paragraph of one to `most` words, which follows from the thinking so far."""

    def step(thinking: str) -> str:
        drawn = random.Random(zlib.crc32(f"{name} {thinking}".encode()))
        return " ".join(f"{name}{drawn.randrange(10**6)}" for _ in range(drawn.randint(1, most))) + "\n\n"

    return step


class SlowJudge(ThinkingModel):
    """While it thinks about one draft, all others of the window are written, and the base model's steps behind them."""

    def _respond(self, request: GenerateRequest) -> Script:
        answer = super()._respond(request)
        return Answer(answer, first_latency=0.03) if answer == "unaligned" else answer


def think(settings: DelegationSettings, small: ThinkingModel, base: ThinkingModel) -> tuple[Thinking, Event]:
    backend = delegating(settings, base=base, small=small)
    thinking = Thinking(ASKED, settings, backend.roles)

    async def run() -> list[Event]:
        return [event async for event in backend.think(thinking)]

    return thinking, anyio.run(run)[-1]


@pytest.mark.parametrize(
    "settings",
    [lookahead(4), pytest.param(lookahead(16), marks=pytest.mark.slow), SpecReasonSettings(**NAMED)],
    ids=["lookahead 4", "lookahead 16", "specreason"],
)
def test_drafts_that_run_away_are_ended(settings: DelegationSettings) -> None:
    """The base model's steps have two tokens, and each costs drafts that are as long as a step may be."""
    settings = settings.model_copy(update={"budget_tokens": 150, "step_tokens": 100})
    small = ThinkingModel(lambda thinking: "on and " * 200)
    base = SlowJudge(steps("base", 1), same=lambda draft, own: False, score=lambda step: "0")
    thinking, ended = think(settings, small, base)
    assert ended == Ended("budget") and thinking.counts.all_kept == 150
    assert thinking.counts.spent["small"] <= settings.spend_tokens
    assert {step.author for step in thinking.steps[-20:]} == {"base"} and thinking.room("small") == 0


@pytest.mark.parametrize("kind", [SpecReasonSettings, SpeculativeThinkingSettings, LookaheadSettings])
@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("budget", [40, 0])
def test_a_requests_own_budget_of_thoughts_ends_the_thinking(
    kind: type[DelegationSettings], speculation: bool, budget: int
) -> None:
    backend = delegating(
        kind(**NAMED, budget_tokens=200), base=ThinkingModel(steps("base")), small=ThinkingModel(steps("small"))
    )
    request = replace(ASKED, thinking_budget=budget, speculation=speculation)

    async def last() -> Delta:
        return [delta async for delta in backend.generate(request)][-1]

    told = anyio.run(last).speculation
    assert isinstance(told, StepSpeculation) and told.ended == "budget" and sum(told.kept_tokens.values()) == budget
