"""Lookahead Reasoning's published decisions, case by case; the expected steps were derived from the rule by hand.

What a model writes next depends on the last word of the thinking, or on its last letter: `small` and `base` list the
steps, in which "|" is a blank line. A model without an entry has nothing more to say. Words and blank lines are one
token each. By default a step may have four of them, two drafts are ahead, and the judge says that steps with the same
digit mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentspec.reasoning.settings import LookaheadSettings
from agentspec.testing import Answer
from agentspec.types import GenerateRequest, SamplingParams
from tests.thinking_model import ThinkingModel, thinks

START = ""
SAMPLED = GenerateRequest("fast", messages=[{"role": "user", "content": "?"}], sampling=SamplingParams())
Steps = Mapping[str, str]


@dataclass(frozen=True)
class Case:
    """`kept`: the steps in order, "s " or "b " (who wrote them) before each; `scored`: the verdicts, in order."""

    small: Steps
    base: Steps
    kept: Sequence[str]
    scored: Sequence[bool]
    ended: str = "silent"
    settings: dict[str, Any] = field(default_factory=dict)
    verdict: str | None = None


def chain(word: str, count: int = 4) -> Steps:
    """The steps "WORD1", "WORD2", ..., each behind any step with the number before."""
    behind = ["", *"123456789"]
    return {behind[n]: f"{word}{n + 1}|" for n in range(count)}


def judged(verdict: str, accepted: bool) -> Case:
    """What a judge's word decides about the first of two steps."""
    kept = ["s d1|", "s d2|"] if accepted else ["b o1|", "b o2|"]
    return Case(chain("d", 2), chain("o", 2), kept, [accepted] * 2, verdict=verdict)


def ahead(depth: int, steps: int = 7) -> Case:
    """All drafts mean the same: nothing of the base model is ever put between them."""
    kept = [f"s d{n}|" for n in range(1, steps + 1)]
    return Case(chain("d", steps), chain("o", steps), kept, [True] * steps, settings={"depth": depth})


def refused(digit: str) -> Case:
    """A draft that is cut behind `digit` gives way to the base model's step 1."""
    small, base = {START: f"a b c {digit} rest|", "1": "d2|"}, chain("o", 2)
    return Case(small, base, ["b o1|", "s d2|"], [False, True])


CASES = {
    # The window moves on while drafts are accepted.
    **{f"all accepted, depth {depth}": ahead(depth) for depth in (1, 2, 3, 4, 8)},
    "nothing is drafted": Case(chain("d"), chain("o"), [f"b o{n}|" for n in (1, 2, 3, 4)], [], settings={"depth": 0}),
    "none accepted": Case(
        {START: "x9|", "1": "x9|", "2": "x9|"}, chain("o", 3), ["b o1|", "b o2|", "b o3|"], [False] * 3
    ),
    "the first differs": Case(
        {**chain("d"), START: "x9|"}, chain("o"), ["b o1|", "s d2|", "s d3|", "s d4|"], [False, *[True] * 3]
    ),
    "the second differs": Case(
        {**chain("d"), "1": "x9|"}, chain("o"), ["s d1|", "b o2|", "s d3|", "s d4|"], [True, False, True, True]
    ),
    "the fourth differs, behind a full window": Case(
        {**chain("d"), "3": "x9|"}, chain("o"), ["s d1|", "s d2|", "s d3|", "b o4|"], [*[True] * 3, False]
    ),
    "two in a row differ": Case(
        {**chain("d"), "1": "x9|", "2": "x9|"},
        chain("o"),
        ["s d1|", "b o2|", "b o3|", "s d4|"],
        [True, False, False, True],
    ),
    "every second differs": Case(
        {START: "x9|", "1": "d2|", "2": "x9|", "3": "d4|"},
        chain("o"),
        ["b o1|", "s d2|", "b o3|", "s d4|"],
        [False, True, False, True],
    ),
    "the base model goes on behind the draft's words": Case(
        {START: "d1|"}, {START: "o1|", "d1": "behind d|", "o1": "behind o|"}, ["s d1|", "b behind d|"], [True]
    ),
    # The judge: one word, which has to hold "ali" and not "un".
    "aligned": judged("aligned", True),
    "capitals": judged("Aligned", True),
    "its bracket": judged("aligned]", True),
    "a piece of it": judged("ali", True),
    "too small a piece": judged("al", False),
    "unaligned": judged("unaligned", False),
    "a piece of that": judged("un", False),
    "unali": judged("unali", False),
    "another word": judged("perhaps", False),
    "no word": judged("", False),
    # Equal steps need no judge: it would refuse these.
    "equal": Case(chain("o", 2), chain("o", 2), ["s o1|", "s o2|"], [True] * 2, verdict="unaligned"),
    "equal but for capitals": Case(chain("O", 2), chain("o", 2), ["s O1|", "s O2|"], [True] * 2, verdict="unaligned"),
    "equal but for spaces": Case({START: "a b 1|"}, {START: "ab 1|"}, ["s a b 1|"], [True], verdict="unaligned"),
    "equal but for line ends": Case({START: "a\nb 1|"}, {START: "ab 1|"}, ["s a\nb 1|"], [True], verdict="unaligned"),
    "a tab is a difference": Case({START: "a\tb 1|"}, {START: "ab 1|"}, ["b ab 1|"], [False], verdict="unaligned"),
    # Steps that are cut at four tokens.
    "a cut draft may be kept, its successors not": Case(
        {START: "a b c 1 rest|", "1": " 2|", "2": "d3|"},
        {START: "o1|", "1": " 2|", "2": "o3|"},
        ["s a b c 1", "b  2|", "s d3|"],
        [True, True],
    ),
    "a cut draft that differs": refused("9"),
    "behind the base model's cut step no draft is kept": Case(
        {START: "x9|", "1": " 2|", "2": "d3|"},
        {START: "a b c 1 rest|", "1": " 2|", "2": "o3|"},
        ["b a b c 1", "b  2|", "s d3|"],
        [False, True],
    ),
    "two cut steps of the base model": Case(
        {START: "x9|", "3": "d4|"},
        {START: "a b c 1 rest|", "1": " b c d 2 rest|", "2": " 3|", "3": "o4|"},
        ["b a b c 1", "b  b c d 2", "b  3|", "s d4|"],
        [False, True],
    ),
    "a cut draft in place of a cut step": Case(
        {START: "a b c 1 rest|", "2": "d3|"},
        {START: "e f g 1 rest|", "1": " 2|", "2": "o3|"},
        ["s a b c 1", "b  2|", "s d3|"],
        [True, True],
    ),
    # How the thinking ends.
    "the base model's end counts, even where the draft is equal": Case(
        {START: "a 1|"}, {START: "a 1"}, ["b a 1"], [False]
    ),
    "a draft that ends may be kept": Case({START: "a 1"}, {START: "a 1|"}, ["s a 1"], [True]),
    "both close": Case({START: "d1 </think>"}, {START: "o1 </think>"}, ["s d1 "], [True], "closed"),
    "the base model closes": Case({START: "d1|"}, {START: "o1 </think>"}, ["b o1 "], [False], "closed"),
    "the draft closes": Case({START: "d1 </think>"}, {START: "o1|"}, ["b o1|"], [False]),
    "an empty draft": Case({START: "|"}, {START: "o1|"}, ["b o1|"], [False], verdict="aligned"),
    "equal steps in a row end nothing": Case(
        {START: "a 1|", "1": "a 2|", "2": "a 2|"},
        {START: "a 1|", "1": "a 2|", "2": "a 2|"},
        ["s a 1|", *["s a 2|"] * 3],
        [True] * 4,
        "budget",
        {"budget_tokens": 12},
    ),
    "a boxed answer ends nothing": Case(
        {START: "boxed 1|", "1": "d2|"}, chain("o", 2), ["s boxed 1|", "s d2|"], [True] * 2
    ),
    "the budget ends": Case(chain("d"), chain("o"), ["s d1|", "s d2|"], [True] * 2, "budget", {"budget_tokens": 4}),
}


def model(steps: Steps, same: Callable[[str, str], bool]) -> ThinkingModel:
    def step(thinking: str) -> Answer:
        words = thinking.split()
        text = steps.get(words[-1] if words else START) or steps.get(words[-1][-1] if words else START) or ""
        return Answer(text.replace("|", "\n\n"), finish_reason="stop")

    return ThinkingModel(step, same=same)


class Saying(ThinkingModel):
    """A judge that says the same to every question."""

    def __init__(self, word: str) -> None:
        super().__init__(lambda thinking: word)

    def _respond(self, request: GenerateRequest) -> str:
        assert self.prompt_text(request).endswith("[")
        return str(self._step(""))


@pytest.mark.parametrize("name", CASES)
def test_each_case_goes_as_published(name: str) -> None:
    case = CASES[name]
    settings = LookaheadSettings(base="base", small="small", **{"depth": 2, "step_tokens": 4, **case.settings})

    def same(draft: str, own: str) -> bool:
        return draft.split()[-1][-1] == own.split()[-1][-1]

    judge = None if case.verdict is None else Saying(case.verdict)
    found = thinks(settings, SAMPLED, base=model(case.base, same), small=model(case.small, same), judge=judge)
    assert [step for step in found.kept if step[2:].strip()] == [step.replace("|", "\n\n") for step in case.kept]
    scored = [record["accepted"] for record in found.events("scored")]
    assert scored[: len(case.scored)] == list(case.scored) and not any(scored[len(case.scored) :])
    assert found.ended == case.ended
