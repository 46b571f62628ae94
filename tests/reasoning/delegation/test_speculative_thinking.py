from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.base import Capabilities
from agentspec.errors import UpstreamError
from agentspec.reasoning.delegation.speculative_thinking import Overload
from agentspec.reasoning.delegation.steps import Accepted, Event, Failed, Rewritten, ThinkingText, Triggered
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


def thought(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, ThinkingText))


def authors(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.step.author, event.step.text) for event in events if isinstance(event, (Accepted, Rewritten))]


def rules(events: list[Event]) -> list[str]:
    return [event.rule for event in events if isinstance(event, Triggered)]


@MODES
async def test_doubt_hands_the_next_words_to_the_base_model(abilities: Capabilities) -> None:
    small = Speaker("so\n\nWait I doubt this much\n\nso it is Answer: 4\n\n", capabilities=abilities)
    base = Speaker("x\n\nBASE writes here and more", capabilities=abilities)
    events = await run(small, base, knobs())
    assert authors(events)[1] == ("base", "BASE writes here")
    assert thought(events) == "so\n\nBASE writes here this much\n\nso it is Answer: 4\n\n"
    assert [(e.rule, e.detail) for e in events if isinstance(e, Triggered)] == [("reflection", "doubt")]


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


@given(doubts=st.lists(st.integers(0, 40), max_size=12))
def test_overload_comes_later_and_lasts_longer_each_time(doubts: list[int]) -> None:
    overload = Overload(knobs())
    for time, count in enumerate(doubts):
        overload.doubts, overload.times = count, time
        assert overload.due is (count >= min(15 + 5 * time, 30))
        assert overload.take() == min(125 + 25 * time, 200)
        assert overload.doubts == 0
