from __future__ import annotations

import re
from typing import Any

import pytest

from agentspec.backends.base import Capabilities
from agentspec.errors import UpstreamError
from agentspec.reasoning.delegation.speculative_thinking import Overload
from agentspec.reasoning.delegation.steps import Accepted, Event, Failed, ThinkingText
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.settings import SpeculativeThinkingSettings
from agentspec.testing import Answer, Script
from agentspec.types import GenerateRequest, SamplingParams
from tests.fakes import delegating
from tests.thinking_model import ThinkingModel, having

pytestmark = pytest.mark.anyio

MODES = pytest.mark.parametrize(
    "abilities",
    [Capabilities(token_ids=True, logprobs=True), Capabilities(continue_final=True, logprobs=True)],
    ids=["ids", "messages"],
)
ASK = GenerateRequest(
    "fast", messages=[{"role": "user", "content": "Two plus two?"}], sampling=SamplingParams(temperature=0.0)
)


def knobs(**given: Any) -> SpeculativeThinkingSettings:
    kind = having(SpeculativeThinkingSettings, peek_tokens=3, verify_tokens=5, answer_marks=("Answer:",))
    return kind(**{"base": "base", "small": "small", **given})


class Speaker(ThinkingModel):
    """Goes on with a text of its own wherever the thinking stands: its next words, whoever wrote those before."""

    def __init__(self, text: str, **options: Any) -> None:
        self.words = self_words(text)
        super().__init__(self._go_on, **options)

    def _go_on(self, thinking: str) -> Script:
        return "".join(self.words[len(self_words(thinking)) :])


def self_words(text: str) -> list[str]:

    return re.findall(r"\n\n|\s*?[^\s]+", text)


async def run(small: ThinkingModel, base: ThinkingModel, settings: SpeculativeThinkingSettings) -> list[Event]:
    backend = delegating(settings, base=base, small=small)
    thinking = Thinking(ASK, settings, backend.roles)
    events = [event async for event in backend.think(thinking)]
    assert small.active == base.active == 0
    return events


@MODES
async def test_what_was_sent_before_the_small_model_failed_stays_part_of_the_thinking(abilities: Capabilities) -> None:
    """The client cannot take it back, so the models go on behind it."""
    broken = Answer("one two three four\n\n", error=UpstreamError("gone"), error_after=2)
    small = ThinkingModel(lambda thinking: broken, capabilities=abilities)
    base = Speaker("x x three four. Answer: 4\n\n", capabilities=abilities)
    events = await run(small, base, knobs())
    sent = "".join(event.text for event in events if isinstance(event, ThinkingText))
    assert sent == "one two three four. Answer: 4\n\n"
    kept = [event.step for event in events if isinstance(event, Accepted)]
    assert (kept[0].author, kept[0].text, kept[0].tokens) == ("small", "one two", 2)
    assert "".join(step.text for step in kept) == sent
    assert [event for event in events if isinstance(event, Failed)] == [Failed("small", "gone")]


def test_overload_comes_later_and_lasts_longer_each_time() -> None:
    overload = Overload(knobs())
    for time in range(8):
        overload.doubts = min(15 + 5 * time, 30) - 1
        assert not overload.due
        overload.doubts += 1
        assert overload.due and overload.take() == min(125 + 25 * time, 200) and not overload.doubts
