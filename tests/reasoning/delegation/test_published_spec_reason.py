"""SpecReason's published decisions, case by case; the expected steps were derived from the rule by hand.

What a model writes next depends on the number of steps so far; "|" is a blank line. Scores are listed for the steps
that are scored, in order. Words and blank lines are one token each; a step may have six.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentspec.reasoning.settings import SpecReasonSettings
from tests.thinking_model import ThinkingModel, thinks

S3 = ["s1|", "s2|", "s3 boxed|"]
B3 = ["b1|", "b2|", "b3 boxed|"]


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
    "Answer:": Case("9", ["s Answer: 4|"], small=["Answer: 4|"]),
    "ANSWER:": Case("9", ["s ANSWER: 4|"], small=["ANSWER: 4|"]),
    "answer: is none": Case("99", ["s answer: 4|", "s boxed|"], small=["answer: 4|", "boxed|"]),
    "boxed inside a word": Case("9", ["s unboxed|"], small=["unboxed|"]),
    "the same step with a space": Case(
        "9999", ["s a|", "s b|", "s  b|", "s boxed|"], small=["a|", "b|", " b|", "boxed|"]
    ),
    "the step before the last": Case("9999", ["s a|", "s b|", "s a|", "s boxed|"], small=["a|", "b|", "a|", "boxed|"]),
    "the step that reaches the budget is cut": Case(
        "99", ["s s1|", "s s2"], ended="budget", settings={"budget_tokens": 3}
    ),
    "a step without end is cut": Case("99", ["s a b c d e f", "s boxed|"], small=["a b c d e f g|", "boxed|"]),
    "an empty step is not scored": Case("9", ["b b1|", "s boxed|"], small=["", "boxed|"]),
    # A mark that closes the thinking is removed, and the thinking goes on to an answer mark.
    "a closing mark": Case("999", ["s s1|\n", *ALL_SMALL[1:]], small=["s1\n</think>|", *S3[1:]]),
    "a closing mark with words behind it": Case(
        "999", ["s s1  more|", *ALL_SMALL[1:]], small=["s1 </think> more|", *S3[1:]]
    ),
    "a closing mark in a rejected draft": Case("19", ["b b1|", "s boxed|"], small=["s1 </think>", "boxed|"]),
    "a closing mark of the base model": Case(
        "191", ["b b1 |", "s s2|", ALL_BASE[2]], small=S3, base=["b1 </think>|", *B3[1:]]
    ),
    "a closing mark of the base model alone": Case(
        "", ["b b1 "], base=["b1 </think>|", *B3[1:]], ended="closed", settings={"threshold": 9.5}
    ),
    "a closing mark behind an answer": Case("9", ["s boxed |"], small=["boxed </think>|"]),
    "a closing mark alone leaves the step to the base model": Case(
        "9", [ALL_BASE[0], "s boxed|"], small=["</think>|", "boxed|"]
    ),
    "closing marks alone of both end": Case("", ["b |"], small=["</think>|"], base=["</think>|"], ended="silent"),
    "a step about a score": Case("9", ["s the score is 8 boxed|"], small=["the score is 8 boxed|"]),
}


@pytest.mark.parametrize("name", CASES)
def test_each_case_goes_as_published(name: str) -> None:
    case = CASES[name]
    settings = SpecReasonSettings(**{"base": "base", "small": "small", "step_tokens": 6, **case.settings})
    said, kept = iter(case.said), [step.replace("|", "\n\n") for step in case.kept]

    def numbered(texts: Sequence[str], thinking: str) -> str:
        at = steps_in(thinking, kept)
        return texts[at].replace("|", "\n\n") if at < len(texts) else ""

    base = ThinkingModel(lambda text: numbered(case.base, text), score=lambda step: next(said))
    found = thinks(settings, base=base, small=ThinkingModel(lambda text: numbered(case.small, text)))
    scored = [record for record in found.events("scored") if record["reason"] != "blank"]
    assert found.kept == kept and len(scored) == len(case.said) and found.ended == case.ended


def steps_in(thinking: str, kept: Sequence[str]) -> int:
    """How many of the steps that the case expects `thinking` holds; one more where it goes on behind them."""
    at = 0
    while at < len(kept) and thinking.startswith(kept[at][2:]) and thinking:
        thinking, at = thinking.removeprefix(kept[at][2:]), at + 1
    return at + bool(thinking)
