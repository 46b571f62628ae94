"""Speculative Thinking's published decisions, case by case; the expected steps were derived from the rule by hand.

In each case the models write the listed texts, one a call, cut where the call's limits say: the small model a
paragraph and the words that are looked at in turn. A model whose list is used up has nothing more to say; "|" is a
blank line. Words and blank lines are one token each. The limits are 4 tokens looked at, 6 of a verification and 5 of
a beginning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentspec.reasoning.settings import SpeculativeThinkingSettings
from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest
from tests.thinking_model import having, thinks

LIMITS = {"peek_tokens": 4, "verify_tokens": 6, "begin_tokens": 5, "rescue_tokens": 6}
CONSTANTS = {*LIMITS, "overload"}
RECAP = "Let me check whether there are some wrong steps:"
NEGATIVE = "wait no no no"
SIX = "v1 v2 v3 v4 v5 v6"
"""What the base model writes where it may write six tokens."""


@dataclass(frozen=True)
class Case:
    """`kept`: the steps in order, "s " or "b " (who wrote them) before each; `rules`: what fired, in order."""

    small: Sequence[str]
    base: Sequence[str]
    kept: Sequence[str]
    rules: Sequence[str] = ()
    ended: str = "silent"
    settings: dict[str, Any] = field(default_factory=dict)
    end: str = ""


CASES = {
    "no check at the beginning": Case(["wait a|", "b", "c|"], [], ["s wait a|", "s c|"]),
    # What the base model writes in their place.
    "behind its blank line the small model writes first": Case(
        ["a|", NEGATIVE, "wait z|"], ["x y w|"], ["s a|", "b x y w|", "s wait z|"], ["reflection"]
    ),
    "its end is the end, also where it verifies": Case(
        ["a|", NEGATIVE], ["check y", "v1 v2"], ["s a|", "b check y"], ["reflection"]
    ),
    "its closing mark is the end": Case(
        ["a|", NEGATIVE], ["check </think> y"], ["s a|", "b check "], ["reflection"], "closed"
    ),
    # A small model that was not trained to reason.
    "led from the beginning and at each blank line": Case(
        ["c|", "n", " z|"],
        ["B1|B2 B3 B4 B5", "x y w v"],
        ["b B1|B2 B3 B4", "s c|", "b x y w v", "s  z|"],
        ["begin", "reflection", "reflection"],
        settings={"small_reasons": False},
    ),
    "led into a verification": Case(
        ["c|", "n", " z|"],
        ["B1 B2 B3 B4 B5", "x check w v", f" {SIX} v7"],
        ["b B1 B2 B3 B4 B5", "s c|", "b x check w v", f"b  {SIX}", "s  z|"],
        ["begin", "reflection", "verification", "reflection"],
        settings={"small_reasons": False},
    ),
    # How paragraphs and the thinking end.
    "a paragraph that is cut is no blank line": Case(
        ["a b c d|", " wait d|", "n", "z|"], [], ["s a b c", "s  wait d|", "s z|"], settings={"step_tokens": 3}
    ),
    "a boxed answer ends nothing": Case(["\\boxed{4}|", "n", "a|"], [], ["s \\boxed{4}|", "s a|"]),
    "a closing mark ends": Case(["a </think> b|"], [], ["s a "], ended="closed"),
    "the small model's end ends": Case(["a|", "n", "b"], [], ["s a|", "s b"]),
    "the budget ends": Case(["a b c d|", NEGATIVE], [], ["s a b c d|"], ended="budget", settings={"budget_tokens": 5}),
    "the budget cuts the base model's words": Case(
        ["a|", NEGATIVE], ["x y w v"], ["s a|", "b x y"], ["reflection"], "budget", {"budget_tokens": 4}
    ),
}


class InTurn(FakeBackend):
    """Writes the listed texts, one a call, and then `end`."""

    def __init__(self, texts: Sequence[str], end: str) -> None:
        self._left = (text.replace("|", "\n\n") for text in texts)
        self._end = end
        super().__init__(self._next)

    def _next(self, request: GenerateRequest) -> Answer:
        text = next(self._left, self._end)
        whole = request.sampling.max_tokens is not None and len(self.encode(text)) >= request.sampling.max_tokens
        return Answer(text, finish_reason="length" if whole else "stop")


@pytest.mark.parametrize("name", CASES)
def test_each_case_goes_as_published(name: str) -> None:
    case = CASES[name]
    assert ours(case) == ([step.replace("|", "\n\n") for step in case.kept], list(case.rules), case.ended)


def ours(case: Case) -> tuple[list[str], list[str], str]:
    """The steps that we keep, the rules that fire, and the end."""
    given = {**LIMITS, **case.settings}
    kind = having(SpeculativeThinkingSettings, **{name: given.pop(name) for name in CONSTANTS & given.keys()})
    settings = kind(base="base", small="small", **given)
    found = thinks(settings, base=InTurn(case.base, case.end), small=InTurn(case.small, case.end))
    return found.kept, [record["rule"] for record in found.events("triggered")], found.ended


def published(case: Case) -> tuple[list[str], list[str], bool]:
    """The program's loop, written from the rule and without our code: the steps that are kept, and what fires.

    The last value says whether a verification was written behind an end, which we do not (docs/strategies.md).
    """
    small, base, kept, rules = iter(case.small), iter(case.base), list[str](), list[str]()
    doubts, limit, recap, behind_end = 0, int(case.settings["overload"]), 6, False

    def own(rule: str, tokens: int) -> bool:
        text, ends = cut(next(base, ""), tokens)
        rules.append(rule)
        kept.append(f"b {text}")
        return ends

    while True:
        paragraph, ends = cut(next(small, ""), 1024, stops=True)
        kept.append(f"s {paragraph}")
        if ends:
            break
        if doubts >= limit:
            kept.append(f"b {RECAP}")
            ends = own("overload", recap)
            doubts, limit, recap = 0, min(limit + 5, 30), min(recap + 25, 200)
        elif mood(cut(next(small, ""), 4)[0]) != 0:
            text, ends = cut(next(base, ""), 4)
            rules.append("reflection")
            kept.append(f"b {text}")
            doubts += mood(text) < 0
            if any(word in text.lower() for word in ("verify", "think again", "recap", "check")):
                behind_end = behind_end or ends
                ends = own("verification", 6)
        if ends:
            break
    return [step for step in kept if step[2:]], rules, behind_end


def cut(text: str, tokens: int, *, stops: bool = False) -> tuple[str, bool]:
    """What a call with that limit gives of `text`, and whether the model ends by itself in it."""
    words = re.findall(r"\n\n|(?:(?!\n\n)\s)*\S+", text)
    given = words[:tokens]
    if stops and "\n\n" in given:
        return "".join(given[: given.index("\n\n") + 1]), False
    return "".join(given), len(words) < tokens


def mood(text: str) -> int:
    lower = text.lower()
    positive = sum(map(lower.count, ("yeah", "yes", "final answer", "confident")))
    doubting = ("wait", "alternatively", "hold on", "another", "verify", "think again", "recap", "check")
    negative = sum(map(lower.count, doubting))
    return 0 if not positive and not negative else (1 if positive > negative else -1)


MOODS = ["final answer", "hold on", "think again", "checkbook", *"yeah alternatively verify recap".split()]
WORDS = st.sampled_from([*"so x Wait yes check eyes another await confident n".split(), *MOODS])
PARAGRAPH = st.lists(WORDS, min_size=1, max_size=7).map(" ".join)
TEXT = st.lists(PARAGRAPH, min_size=1, max_size=3).map("\n\n".join)


@given(
    small=st.lists(st.one_of(TEXT, TEXT.map("{}\n\n".format)), max_size=14),
    base=st.lists(TEXT, max_size=10),
    overload=st.integers(1, 3),
)
def test_any_texts_follow_the_published_loop(small: list[str], base: list[str], overload: int) -> None:
    case = Case(small, base, (), settings={"overload": overload}, end="</think>")
    expected, fired, behind_end = published(case)
    assume(not behind_end)
    kept, rules, _ = ours(case)
    assert (kept, rules) == (expected, fired)
