"""How a judge's word is read, wherever its endpoint puts it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import anyio
import pytest

from agentspec.backends.base import Capabilities
from agentspec.errors import InvalidRequestError
from agentspec.reasoning.delegation.steps import Event, Scored
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.settings import DelegationSettings, LookaheadSettings, SpecReasonSettings
from agentspec.testing import Script
from agentspec.types import Delta, GenerateRequest, SamplingParams
from tests.fakes import delegating
from tests.thinking_model import ThinkingModel, having

ASKED = GenerateRequest(
    "fast", messages=[{"role": "user", "content": "Two plus two?"}], sampling=SamplingParams(temperature=0.0)
)
MESSAGES = Capabilities(continue_final=True, logprobs=True)
BOXED = having(LookaheadSettings, answer_marks=("boxed",))


class Parsed(ThinkingModel):
    """An endpoint whose reasoning parser takes every word for thinking; `odd` alters what it sends of a text."""

    def __init__(self, *given: Any, logprobs: bool, odd: str = "", **options: Any) -> None:
        super().__init__(*given, capabilities=MESSAGES, **options)
        self._keeps_logprobs, self._odd = logprobs, odd

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                told = delta.logprobs if self._keeps_logprobs else ()
                sent = self._odd if delta.text and request.sampling.max_tokens == 1 and self._odd else delta.text
                yield replace(delta, text="", logprobs=told, extra={"reasoning_content": sent} if sent else {})


def scores(settings: DelegationSettings, judge: ThinkingModel) -> list[float]:
    base, small = (ThinkingModel(step, capabilities=MESSAGES) for step in (lambda text: own(text, "b"), own))
    backend = delegating(settings, base=base, small=small, judge=judge)

    async def events() -> list[Event]:
        return [event async for event in backend.think(Thinking(ASKED, settings, backend.roles))]

    return [event.value for event in anyio.run(events) if isinstance(event, Scored)]


def own(thinking: str, who: str = "s") -> str:
    return f"{who} says boxed\n\n" if thinking else f"{who} says one\n\n"


@pytest.mark.parametrize("logprobs", [True, False])
def test_a_score_or_verdict_that_comes_as_reasoning_counts(logprobs: bool) -> None:
    specreason = SpecReasonSettings(base="base", small="small")
    assert scores(specreason, Parsed(own, score=lambda step: "8", logprobs=logprobs)) == [8, 8]
    lookahead = BOXED(base="base", small="small")
    assert scores(lookahead, Parsed(own, same=lambda draft, own: True, logprobs=logprobs)) == [1, 1]


def test_a_score_is_the_token_that_the_log_probabilities_name() -> None:
    """As published; the text of the answer may have lost a space, or have one more."""
    settings = SpecReasonSettings(base="base", small="small")
    assert scores(settings, Parsed(own, score=lambda step: "8", logprobs=True, odd=" 8")) == [8, 8]
    assert scores(settings, Parsed(own, score=lambda step: "8", logprobs=False, odd=" 8")) == [0, 0]


class Plain(ThinkingModel):
    """An endpoint that refuses to tell log-probabilities, as its probe has found."""

    def _respond(self, request: GenerateRequest) -> Script:
        refused = InvalidRequestError("logprobs are not supported")
        return refused if request.sampling.logprobs or request.sampling.top_logprobs else super()._respond(request)


def test_a_judge_that_refuses_log_probabilities_is_not_asked_for_them() -> None:
    able = Capabilities(continue_final=True)
    judge = Plain(own, score=lambda step: "8", same=lambda draft, own: True, capabilities=able)
    assert scores(SpecReasonSettings(base="base", small="small"), judge) == [8, 8]
    assert scores(BOXED(base="base", small="small"), judge) == [1, 1]
