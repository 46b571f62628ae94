"""SpecReason's published rules, written down once more without our code, and our steps against them.

Where we differ it is on purpose (docs/strategies.md gives the reasons), and these tests pin each difference. Token ids
are kept and the blank line belongs to its step: `test_prompts_only_grow_in_token_ids`. The base model writes the
answer: `test_the_answer_follows_the_thinking_and_reports_figures`. `</think>` ends the base model's own thinking
alone, what is dropped has a budget too, no step runs over its end, and an empty step is not scored:
`test_each_case_goes_as_published`.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from agentspec.reasoning.settings import SpecReasonSettings
from tests.thinking_model import ThinkingModel, thinks

Steps = list[tuple[str, str]]  # author, text

WORDS = st.sampled_from(["so", "then 2", "x = 1", "boxed", "wait", "a\nb", "Answer: 1", "one two three four"])
LISTED = st.lists(WORDS, min_size=1, max_size=6)
TOKENS = st.sampled_from([*"0123456789", " 7", "7.", "", "good", "10", "²"])


def published(
    small: Callable[[str], str],
    base: Callable[[str], str],
    judge: Callable[[str], str],
    *,
    threshold: float,
    budget: int,
) -> Steps:
    """The script's loop: a draft is kept from `threshold` on, otherwise the base model's step stands in its place."""
    steps: Steps = []
    while True:
        so_far = "".join(text for _, text in steps)
        kept = None
        drafted = _paragraph(small(so_far))
        if _score(judge(drafted.strip())) >= threshold and threshold <= 9:  # ours: above 9 not even a "10" is accepted
            kept = ("small", drafted)
        steps.append(kept or ("base", _paragraph(base(so_far))))
        texts = [text for _, text in steps]
        if any(mark in texts[-1] for mark in ("boxed", "Answer:", "ANSWER:")):
            return steps
        if len(texts) > 2 and texts[-1] == texts[-2]:
            return steps
        if _tokens(texts) >= budget:
            return steps


def _paragraph(text: str) -> str:
    return text.partition("\n\n")[0] + "\n\n"


def _score(token: str) -> float:
    """The generated token, if all of it is digits. (The program fails at digits that are no number, like "\u00b2".)"""
    return float(int(token)) if token.isdecimal() else 0.0


def _tokens(texts: list[str]) -> int:
    """Of the scripted models: one a word, and one the blank line."""
    return sum(len(text.split()) + 1 for text in texts)


def ours(
    small: Callable[[str], str], base: Callable[[str], str], judge: Callable[[str], str], settings: SpecReasonSettings
) -> tuple[Steps, int, str]:
    """Our steps, the tokens that stay, and why the thinking ended."""
    found = thinks(settings, base=ThinkingModel(base, score=judge), small=ThinkingModel(small))
    steps = [(step["author"], step["text"]) for step in found.steps]
    return steps, sum(found.figures.kept_tokens.values()), found.ended


@given(
    drafts=LISTED,
    own=LISTED,
    scores=st.dictionaries(WORDS, TOKENS),
    threshold=st.integers(0, 20).map(lambda half: half / 2),
    budget=st.integers(1, 24) | st.just(8192),
)
def test_steps_equal_those_of_the_published_rules(
    drafts: list[str], own: list[str], scores: dict[str, str], threshold: float, budget: int
) -> None:
    def model(steps: list[str]) -> Callable[[str], str]:
        return lambda text: steps[min(text.count("\n\n"), len(steps) - 1)] + "\n\nmore"

    def judge(step: str) -> str:
        return scores.get(step, "5")

    settings = SpecReasonSettings(base="base", small="small", threshold=threshold, budget_tokens=budget)
    wanted = published(model(drafts), model(own), judge, threshold=threshold, budget=budget)
    found, kept, ended = ours(model(drafts), model(own), judge, settings)
    whole = _tokens([text for _, text in wanted])
    if whole <= budget:
        assert found == wanted and kept == whole
    else:  # theirs runs over the budget by its last step, ours is cut there
        assert len(found) == len(wanted) and found[:-1] == wanted[:-1] and kept <= budget
    assert (ended == "budget") <= (whole >= budget)
