"""SpecReason's published decisions, case by case; the expected steps were derived from the rule by hand.

What a model writes next depends on the number of steps so far. Scores are listed for the steps that are scored, in
order. Words and blank lines are one token each; a step may have six.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentspec.reasoning.settings import SpecReasonSettings
from tests.thinking_model import ThinkingModel, thinks

S3 = ["s1\n\n", "s2\n\n", "s3 boxed\n\n"]
B3 = ["b1\n\n", "b2\n\n", "b3 boxed\n\n"]


@dataclass(frozen=True)
class Case:
    """`said`: the judge's next token for each scored step; `kept`: the steps in order, "s " or "b " (who wrote them)
    before each.
    """

    said: Sequence[str]
    kept: Sequence[str]
    small: Sequence[str] = tuple(S3)
    base: Sequence[str] = tuple(B3)
    ended: str = "answered"
    settings: dict[str, Any] = field(default_factory=dict)


ALL_SMALL = [f"s {text}" for text in S3]
ALL_BASE = [f"b {text}" for text in B3]


CASES = {
    # How the thinking ends.
    "Answer:": Case("9", ["s Answer: 4\n\n"], small=["Answer: 4\n\n"]),
    "ANSWER:": Case("9", ["s ANSWER: 4\n\n"], small=["ANSWER: 4\n\n"]),
    "answer: is none": Case("99", ["s answer: 4\n\n", "s boxed\n\n"], small=["answer: 4\n\n", "boxed\n\n"]),
    "boxed inside a word": Case("9", ["s unboxed\n\n"], small=["unboxed\n\n"]),
    "an answer in a rejected draft": Case(
        "199", ["b b1\n\n", "s s2\n\n", "s boxed\n\n"], small=["boxed\n\n", "s2\n\n", "boxed\n\n"], base=["b1\n\n"]
    ),
    "an answer in place of a draft": Case("1", ["b boxed\n\n"], base=["boxed\n\n"]),
    "the same step at once": Case(
        "999", ["s a\n\n", "s a\n\n", "s a\n\n"], small=["a\n\n", "a\n\n", "a\n\n"], ended="repeated"
    ),
    "the same step later": Case(
        "999", ["s a\n\n", "s b\n\n", "s b\n\n"], small=["a\n\n", "b\n\n", "b\n\n"], ended="repeated"
    ),
    "the same step by the base model": Case(
        "991",
        ["s a\n\n", "s b\n\n", "b b\n\n"],
        small=["a\n\n", "b\n\n", "c\n\n"],
        base=["", "", "b\n\n"],
        ended="repeated",
    ),
    "the same step with a space": Case(
        "9999", ["s a\n\n", "s b\n\n", "s  b\n\n", "s boxed\n\n"], small=["a\n\n", "b\n\n", " b\n\n", "boxed\n\n"]
    ),
    "the step before the last": Case(
        "9999", ["s a\n\n", "s b\n\n", "s a\n\n", "s boxed\n\n"], small=["a\n\n", "b\n\n", "a\n\n", "boxed\n\n"]
    ),
    "the budget is reached": Case("99", ["s s1\n\n", "s s2\n\n"], ended="budget", settings={"budget_tokens": 4}),
    "the budget counts no rejected drafts": Case(
        "11", ["b b1\n\n", "b b2\n\n"], ended="budget", settings={"budget_tokens": 4}
    ),
    "the step that reaches the budget is cut": Case(
        "99", ["s s1\n\n", "s s2"], ended="budget", settings={"budget_tokens": 3}
    ),
    "a step without end is cut": Case("99", ["s a b c d e f", "s boxed\n\n"], small=["a b c d e f g\n\n", "boxed\n\n"]),
    "an empty step is not scored": Case("9", ["b b1\n\n", "s boxed\n\n"], small=["", "boxed\n\n"]),
    # A mark that closes the thinking is removed, and the thinking goes on to an answer mark.
    "a closing mark": Case("999", ["s s1\n\n\n", *ALL_SMALL[1:]], small=["s1\n</think>\n\n", *S3[1:]]),
    "a closing mark with words behind it": Case(
        "999", ["s s1  more\n\n", *ALL_SMALL[1:]], small=["s1 </think> more\n\n", *S3[1:]]
    ),
    "a closing mark in a rejected draft": Case("19", ["b b1\n\n", "s boxed\n\n"], small=["s1 </think>", "boxed\n\n"]),
    "a closing mark of the base model": Case(
        "191", ["b b1 \n\n", "s s2\n\n", ALL_BASE[2]], small=S3, base=["b1 </think>\n\n", *B3[1:]]
    ),
    "a closing mark behind an answer": Case("9", ["s boxed \n\n"], small=["boxed </think>\n\n"]),
    "a closing mark alone leaves the step to the base model": Case(
        "9", [ALL_BASE[0], "s boxed\n\n"], small=["</think>\n\n", "boxed\n\n"]
    ),
    "closing marks alone of both end": Case(
        "", ["b \n\n"], small=["</think>\n\n"], base=["</think>\n\n"], ended="silent"
    ),
    "a step about a score": Case("9", ["s the score is 8 boxed\n\n"], small=["the score is 8 boxed\n\n"]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_case_goes_as_published(name: str) -> None:
    case = CASES[name]
    settings = SpecReasonSettings(**{"base": "base", "small": "small", "step_tokens": 6, **case.settings})
    said = iter(case.said)

    def numbered(texts: Sequence[str], thinking: str) -> str:
        at = steps_in(thinking, case.kept)
        return texts[at] if at < len(texts) else ""

    base = ThinkingModel(lambda text: numbered(case.base, text), score=lambda step: next(said))
    found = thinks(settings, base=base, small=ThinkingModel(lambda text: numbered(case.small, text)))
    scored = [record for record in found.events("scored") if record["reason"] != "blank"]
    assert found.kept == list(case.kept) and len(scored) == len(case.said) and found.ended == case.ended


def steps_in(thinking: str, kept: Sequence[str]) -> int:
    """How many of the steps that the case expects `thinking` holds; one more where it goes on behind them."""
    at = 0
    while at < len(kept) and thinking.startswith(kept[at][2:]) and thinking:
        thinking, at = thinking.removeprefix(kept[at][2:]), at + 1
    return at + bool(thinking)
