"""The request's own text as a drafter, against a search written out plainly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.drafters import NgramDrafter
from agentspec.backends.torch.drafters.ngram import LONGEST_MATCH, SHORTEST_MATCH, longest_match
from agentspec.types import Source


def plain_match(text: Sequence[int]) -> tuple[int, int]:
    """Longest suffix that occurs earlier, and where its latest earlier occurrence ends."""
    for length in range(min(LONGEST_MATCH, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if list(text[end - length : end]) == list(text[-length:]):
                return length, end
    return 0, 0


@given(st.lists(st.integers(0, 2), max_size=60))
def test_the_match_is_the_latest_of_the_longest(text: list[int]) -> None:
    assert longest_match(np.asarray(text, dtype=np.int32)) == plain_match(text)


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=12), st.integers(0, 9))
def test_a_draft_continues_the_match_and_its_own_copy(rounds: list[list[int]], budget: int) -> None:
    drafter, context = NgramDrafter(), list[int]()
    for fresh in rounds:
        context += fresh
        draft = drafter.propose(context, budget)
        matched, end = plain_match(context) if context else (0, 0)
        if matched < SHORTEST_MATCH or budget == 0:
            assert draft is None
            continue
        whole = list(context)
        for _ in range(budget):
            whole.append(whole[end + len(whole) - len(context)])
        assert draft is not None and 0 < len(draft) <= budget
        assert draft.tokens.tolist() == whole[len(context) :][: len(draft)]
        assert (np.diff(draft.probabilities) <= 0).all() and set(draft.source.tolist()) == {Source.NGRAM}


def test_a_period_is_continued() -> None:
    draft = NgramDrafter().propose([1, 2, 3, 1, 2, 3, 1, 2], 7)
    assert draft is not None and draft.tokens.tolist() == [3, 1, 2, 3, 1, 2, 3]


def test_confidence_follows_what_happens_per_match_length() -> None:
    """Matches of two tokens are always wrong here, and longer ones never tried."""
    drafter, context = NgramDrafter(), [1, 2, 0]
    first = last = 0.0
    for token in range(3, 30):
        context += [1, 2]
        draft = drafter.propose(context, 1)
        assert draft is not None
        first, last = first or float(draft.probabilities[0]), float(draft.probabilities[0])
        context.append(token)
    assert first == pytest.approx(0.5) and last < 0.1


def test_a_long_text_is_kept_whole() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 50_000, 5000).tolist()
    drafter = NgramDrafter()
    for end in (10, 900, 1030, 4990):
        assert drafter.propose(text[:end], 4) is None or end > 1030
    draft = drafter.propose([*text, *text[3:13]], 4)
    assert draft is not None and draft.tokens.tolist() == text[13:17]
