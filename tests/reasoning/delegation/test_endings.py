"""How a thinking ends where endpoints end their calls in other ways than by a blank line or a limit."""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import anyio
import pytest

from agentspec.backends.base import Capabilities
from agentspec.reasoning.delegation.steps import Ended, Event, ThinkingText
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.settings import (
    DelegationSettings,
    LookaheadSettings,
    SpeculativeThinkingSettings,
)
from agentspec.testing import Answer, FakeBackend, Script
from agentspec.types import Delta, FinishReason, GenerateRequest, Message, SamplingParams, Usage
from tests.fakes import delegating
from tests.thinking_model import ThinkingModel, having

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
    backend = delegating(settings, base=base, small=small)

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


class Silent(ThinkingModel):
    """Says its text and then has nothing more to say; its endpoint names the stop strings if `names`."""

    def __init__(self, text: str, *, names: bool) -> None:
        super().__init__(self._rest, capabilities=MESSAGES)
        self._said, self._names = text, names

    def _rest(self, thinking: str) -> Script:
        assert len(self.requests) < 50, "asked without end"
        return self._said[len(thinking) :] if self._said.startswith(thinking) else ""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta if self._names else replace(delta, stop_reason=None)


@pytest.mark.parametrize("names", [True, False])
def test_the_end_of_a_small_model_is_no_blank_line(names: bool) -> None:
    """Without token ids it is known from the stop strings that the endpoint names, or from the empty words behind it.

    The base model, which is asked at every blank line, would go on for ever.
    """
    settings = having(SpeculativeThinkingSettings, begin_tokens=0)(base="base", small="small", small_reasons=False)
    small, base = Silent("all said", names=names), Answering(Answer("base words"), MESSAGES)
    events = run(settings, base, small)
    assert events[-1] == Ended("silent") and thought(events).strip() == "all said" and not base.requests
    small = Silent("one\n\n", names=names)  # a real blank line: the base model writes behind it, where that is known
    assert thought(run(settings, base, small)) == ("one\n\nbase words" if names else "one\n\n")


def test_an_end_that_names_no_stop_string_is_the_models_own() -> None:
    """Then no further, empty call is needed to notice it."""
    for names, calls in ((True, 2), (False, 3)):
        settings = LookaheadSettings(base="base", small="small", depth=0)
        base = Silent("one two\n\nthree", names=names)
        assert run(settings, base, Silent("", names=names))[-1] == Ended("silent")
        assert len(base.requests) == calls


class Bytes:
    """A model whose tokens are bytes, and that writes `text` whatever it is asked."""

    capabilities = IDS

    def __init__(self, text: str) -> None:
        self._all = text.encode()

    async def render(self, messages: Sequence[Message], *shown: Any) -> str:
        return "".join(f"[{message['content']}]" for message in messages)

    async def tokenize(self, text: str, *, begins: bool = False) -> list[int]:
        return list(text.encode())

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        told = bytes(request.token_ids or ()).rpartition(b"<think>\n")[2]
        left = self._all.removeprefix(told)[: request.sampling.max_tokens]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for byte in left:
            yield Delta(decoder.decode(bytes([byte])), token_ids=(byte,))
        ended = told + left == self._all
        yield Delta(decoder.decode(b"", True), finish_reason="stop" if ended else "length", usage=Usage(1, len(left)))

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("tokens", [4, 5, 6, 7, 11])
def test_a_step_is_not_cut_inside_a_character(tokens: int) -> None:
    text = "a\u00e4\u4e00\U0001f99c\U0001f99c b \u4e8c\u00e4\u4e09 \ufffd c"
    settings = LookaheadSettings(base="base", small="small", step_tokens=tokens)
    backend = delegating(settings, base=Bytes(text), small=Bytes("x"))
    thinking = Thinking(replace(ASKED, speculation=False), settings, backend.roles)

    async def events() -> list[Event]:
        return [event async for event in backend.think(thinking)]

    assert thought(anyio.run(events)) == thinking.text == text
    for step in thinking.steps:
        assert not step.token_ids or bytes(step.token_ids).decode() == step.text
