"""How a thinking ends where endpoints end their calls in other ways than by a blank line or a limit."""

from __future__ import annotations

import anyio
import pytest

from agentspec.backends.base import Capabilities
from agentspec.reasoning.delegation.backend import DelegationBackend
from agentspec.reasoning.delegation.events import Ended, Event, ThinkingText
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.settings import (
    DelegationSettings,
    LookaheadSettings,
    SpeculativeThinkingSettings,
)
from agentspec.testing import Answer, FakeBackend, Script, ThinkingModel
from agentspec.types import FinishReason, GenerateRequest, SamplingParams, Usage

ASKED = GenerateRequest(
    "fast", messages=[{"role": "user", "content": "Two plus two?"}], sampling=SamplingParams(temperature=0.0)
)
IDS = Capabilities(token_ids=True, logprobs=True)
MESSAGES = Capabilities(continue_final=True, logprobs=True)
MODES = pytest.mark.parametrize("abilities", [IDS, MESSAGES], ids=["ids", "messages"])
STRATEGIES = pytest.mark.parametrize(
    "settings",
    [
        SpeculativeThinkingSettings(base="base", small="small"),
        SpeculativeThinkingSettings(base="base", small="small", small_reasons=False),
        LookaheadSettings(base="base", small="small"),
        LookaheadSettings(base="base", small="small", compare="equal"),
    ],
    ids=["speculative thinking", "led by the base model", "lookahead", "lookahead by the letter"],
)


def run(settings: DelegationSettings, base: FakeBackend, small: FakeBackend) -> list[Event]:
    backend = DelegationBackend.of(settings, base=base, small=small)

    async def events() -> list[Event]:
        return [event async for event in backend.think(Thinking(ASKED, settings, backend.roles))]

    return anyio.run(events)


def thought(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ThinkingText))


class Answering(ThinkingModel):
    """Gives each step the same `answer`, and fails if it is asked for ever."""

    def __init__(self, answer: Answer, abilities: Capabilities, most: int = 50) -> None:
        super().__init__(self._again, capabilities=abilities)
        self._again_with, self._most = answer, most

    def _again(self, thinking: str) -> Script:
        assert len(self.requests) < self._most, "asked without end"
        return self._again_with


@MODES
@STRATEGIES
@pytest.mark.parametrize("reason", ["content_filter", "tool_calls", "cancelled", "length", "stop"])
def test_calls_that_add_nothing_end_the_thinking(
    reason: FinishReason, settings: DelegationSettings, abilities: Capabilities
) -> None:
    base, small = (Answering(Answer("", finish_reason=reason), abilities) for _ in range(2))
    assert run(settings, base, small)[-1] == Ended("silent")


@MODES
@STRATEGIES
@pytest.mark.parametrize("reason", ["content_filter", "tool_calls", "cancelled"])
def test_words_that_the_endpoint_broke_off_are_the_last(
    reason: FinishReason, settings: DelegationSettings, abilities: Capabilities
) -> None:
    base, small = (Answering(Answer("one two", finish_reason=reason), abilities) for _ in range(2))
    events = run(settings, base, small)
    assert events[-1] == Ended("silent") and thought(events).count("one two") <= 2


@STRATEGIES
def test_words_of_an_endpoint_that_counts_no_tokens_use_up_the_budget(settings: DelegationSettings) -> None:
    answer = Answer("one two", finish_reason="length", usage=Usage())
    base, small = (Answering(answer, MESSAGES) for _ in range(2))
    assert run(settings.model_copy(update={"budget_tokens": 9}), base, small)[-1] == Ended("budget")
