"""How a thinking ends: by its budgets, and where endpoints end calls in other ways than by a blank line or a limit."""

from __future__ import annotations

import codecs
import itertools
import random
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.base import Capabilities
from agentspec.reasoning.settings import (
    DelegationSettings,
    LookaheadSettings,
    SpecReasonSettings,
    SpeculativeThinkingSettings,
)
from agentspec.testing import Answer, Script
from agentspec.types import Delta, FinishReason, GenerateRequest, Message, Usage
from tests.reasoning.delegation.test_calls import MODES, NAMED
from tests.thinking_model import ASK, IDS, MESSAGES, ThinkingModel, delegating, having, thinks, thought

STRATEGIES = pytest.mark.parametrize(
    "settings",
    [
        SpeculativeThinkingSettings(**NAMED),
        SpeculativeThinkingSettings(**NAMED, small_reasons=False),
        LookaheadSettings(**NAMED),
    ],
    ids=["speculative thinking", "led by the base model", "lookahead"],
)


class Answering(ThinkingModel):
    """Gives each step the same `answer`, and fails if it is asked without end."""

    def __init__(self, answer: Answer, abilities: Capabilities) -> None:
        super().__init__(self._again, capabilities=abilities)
        self._again_with = answer

    def _again(self, thinking: str) -> Script:
        assert len(self.requests) < 50, "asked without end"
        return self._again_with


@MODES
@STRATEGIES
@pytest.mark.parametrize("reason", ["content_filter", "tool_calls", "cancelled", "length", "stop"])
def test_calls_that_add_nothing_end_the_thinking(
    reason: FinishReason, settings: DelegationSettings, abilities: Capabilities
) -> None:
    base, small = (Answering(Answer("", finish_reason=reason), abilities) for _ in range(2))
    assert thinks(settings, base=base, small=small).ended == "silent"
    if reason not in ("length", "stop"):  # words that the endpoint broke off are the last, too
        base, small = (Answering(Answer("one two", finish_reason=reason), abilities) for _ in range(2))
        found = thinks(settings, base=base, small=small)
        assert found.ended == "silent" and found.text.count("one two") <= 2


@STRATEGIES
def test_words_of_an_endpoint_that_counts_no_tokens_use_up_the_budget(settings: DelegationSettings) -> None:
    answer = Answer("one two", finish_reason="length", usage=Usage())
    base, small = (Answering(answer, MESSAGES) for _ in range(2))
    assert thinks(settings.model_copy(update={"budget_tokens": 9}), base=base, small=small).ended == "budget"


class Silent(ThinkingModel):
    """Says its text and then has nothing more to say; its endpoint names the stop strings if `names`."""

    def __init__(self, text: str, *, names: bool) -> None:
        super().__init__(self._rest, capabilities=MESSAGES)
        self._text, self._names = text, names

    def _rest(self, thinking: str) -> Script:
        assert len(self.requests) < 50, "asked without end"
        return self._text[len(thinking) :] if self._text.startswith(thinking) else ""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta if self._names else replace(delta, stop_reason=None)


@pytest.mark.parametrize("names", [True, False])
def test_the_end_of_the_small_model_is_not_taken_for_a_blank_line(names: bool) -> None:
    """Without token ids the stop strings that the endpoint names tell it, or the empty words after it.

    The base model, which is asked at every blank line, would go on without end.
    """
    settings = having(SpeculativeThinkingSettings, begin_tokens=0)(**NAMED, small_reasons=False)
    base = Answering(Answer("base words"), MESSAGES)
    found = thinks(settings, base=base, small=Silent("all said", names=names))
    assert found.ended == "silent" and found.text.strip() == "all said" and len(base.requests) == 1 + 2  # two probes
    found = thinks(
        settings, base=base, small=Silent("one\n\n", names=names)
    )  # a blank line, where it is known to be one
    assert found.text == ("one\n\nbase words" if names else "one\n\n")
    ahead, calls = LookaheadSettings(**NAMED, depth=0), {True: 2, False: 3}[names]  # without: an empty call notices it
    base = Silent("one two\n\nthree", names=names)
    assert thinks(ahead, base=base, small=Silent("", names=names)).ended == "silent"
    assert len(base.requests) == calls + 1 + 2


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
        thinking = bytes(request.token_ids or ()).rpartition(b"<think>\n")[2]
        assert thinking.decode().encode() == thinking  # whole characters
        left = self._all.removeprefix(thinking)[: request.sampling.max_tokens]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for byte in left:
            yield Delta(decoder.decode(bytes([byte])), token_ids=(byte,))
        reason: FinishReason = "stop" if thinking + left == self._all else "length"
        yield Delta(decoder.decode(b"", True), finish_reason=reason, usage=Usage(1, len(left)))

    async def aclose(self) -> None: ...


@pytest.mark.parametrize("tokens", [4, 5, 6, 7, 11])
def test_a_step_is_not_cut_inside_a_character(tokens: int) -> None:
    text = "a\u00e4\u4e00\U0001f99c\U0001f99c b \u4e8c\u00e4\u4e09 \ufffd c"
    settings = LookaheadSettings(**NAMED, step_tokens=tokens)
    found = thinks(settings, replace(ASK, speculation=False), base=Bytes(text), small=Bytes("x"))
    assert found.text == "".join(step["text"] for step in found.steps) == text and len(found.steps) > 2


def steps(name: str, most: int = 12) -> Callable[[str], str]:
    """A paragraph of one to `most` words, which follows from the thinking so far."""

    def step(thinking: str) -> str:
        drawn = random.Random(zlib.crc32(f"{name} {thinking}".encode()))
        return " ".join(f"{name}{drawn.randrange(10**6)}" for _ in range(drawn.randint(1, most))) + "\n\n"

    return step


class SlowJudge(ThinkingModel):
    """While it thinks about one draft, all others of the window are written, and the base model's steps after them."""

    def _respond(self, request: GenerateRequest) -> Script:
        answer = super()._respond(request)
        return Answer(answer, first_latency=0.03) if answer == "unaligned" else answer


@pytest.mark.parametrize(
    "settings", [LookaheadSettings(**NAMED), LookaheadSettings(**NAMED, depth=16), SpecReasonSettings(**NAMED)]
)
def test_endless_drafts_end_by_the_budget(in_virtual_time: Any, settings: DelegationSettings) -> None:
    """The base model's steps have two tokens, and each costs drafts that are as long as a step may be."""
    settings = settings.model_copy(update={"budget_tokens": 40, "step_tokens": 100})
    small = ThinkingModel(lambda thinking: "on and " * 200)
    base = SlowJudge(steps("base", 1), same=lambda draft, own: False, score=lambda step: "0")
    found = in_virtual_time(thought(delegating(settings, base=base, small=small)))
    assert found.ended == "budget" and sum(found.figures.kept_tokens.values()) == 40
    assert found.figures.spent_tokens["small"] <= settings.spend_tokens
    assert {step["author"] for step in found.steps[-5:]} == {"base"}


@pytest.mark.parametrize("kind", [SpecReasonSettings, SpeculativeThinkingSettings, LookaheadSettings])
@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("budget", [40, 0])
def test_a_requests_own_budget_of_thoughts_ends_the_thinking(
    kind: type[DelegationSettings], speculation: bool, budget: int
) -> None:
    request = replace(ASK, thinking_budget=budget, speculation=speculation)
    models = {name: ThinkingModel(steps(name)) for name in ("base", "small")}
    found = thinks(kind(**NAMED, budget_tokens=200), request, **models)
    assert found.ended == "budget" and sum(found.figures.kept_tokens.values()) == budget


class Pieces(ThinkingModel):
    """Writes the thinking in these pieces, cut as they are."""

    def __init__(self, pieces: Sequence[str]) -> None:
        super().__init__(lambda thinking: "", score=lambda step: "1", capabilities=MESSAGES)
        self._pieces = pieces

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        if request.sampling.max_tokens == 1 or self.prompt_text(request).rpartition("<think>\n")[2]:
            async for delta in super().generate(request):
                yield delta
        else:
            for piece in self._pieces:
                yield Delta(piece)
            yield Delta(finish_reason="stop", usage=Usage(1, 1))


@given(said=st.text(alphabet="<a>k/think ", max_size=30), pieces=st.lists(st.integers(0, 30), max_size=8))
def test_no_closing_mark_is_sent_however_the_text_is_cut(said: str, pieces: list[int]) -> None:
    text = said[:9] + "</think>" + said[9:] + "</thi"
    cuts = [0, *sorted(cut for cut in pieces if cut < len(text)), len(text)]
    written = [text[start:end] for start, end in itertools.pairwise(cuts)]
    found = thinks(
        SpecReasonSettings(**NAMED), base=Pieces(written), small=ThinkingModel(steps("s"), capabilities=MESSAGES)
    )
    assert found.text == "".join(step["text"] for step in found.steps)
    assert "</think>" not in found.text and found.text.rstrip().endswith("</thi")
