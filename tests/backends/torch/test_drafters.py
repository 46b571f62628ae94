"""Drafters propose; these tests only ask that they propose the right thing where it is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.drafters import (
    MergedDrafter,
    PredictionDrafter,
    SuffixDrafter,
    chain_draft,
    make_draft,
    merge,
)
from agentspec.types import Draft, Source

PROMPT = [900, 901]
PREDICTION = list(range(100, 130))


class Fixed:
    def __init__(self, draft: Draft | None) -> None:
        self.fixed, self.asked = draft, []

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        self.asked.append((list(context), budget))
        return self.fixed

    def draft(self, max_tokens: int = 32, min_probability: float = 0.0) -> Draft | None:
        self.asked.append((max_tokens, min_probability))
        return self.fixed


def proposed(drafter: PredictionDrafter, answer: Sequence[int], budget: int = 5) -> list[int]:
    draft = drafter.propose([*PROMPT, *answer], budget)
    return [] if draft is None else draft.tokens.tolist()


def test_a_prediction_begins_at_its_beginning_and_is_followed() -> None:
    drafter = PredictionDrafter(PREDICTION, len(PROMPT))
    assert proposed(drafter, []) == PREDICTION[:5]
    assert proposed(drafter, PREDICTION[:7]) == PREDICTION[7:12]
    assert proposed(drafter, PREDICTION) == []
    assert (drafter.accepted, drafter.rejected) == (30, 0)


def test_a_prediction_is_found_again_after_a_replacement_and_an_insertion() -> None:
    drafter = PredictionDrafter(PREDICTION, len(PROMPT))
    answer = [*PREDICTION[:5], 7, 7]
    assert proposed(drafter, answer) == []
    assert proposed(drafter, [*answer, 110, 111]) == PREDICTION[12:17]
    assert drafter.accepted == 5
    assert proposed(drafter, [*answer, 110, 111, *PREDICTION[12:20]]) == PREDICTION[20:25]
    assert (drafter.accepted, drafter.rejected) == (13, 17)


def test_of_several_places_the_nearest_ahead_is_taken() -> None:
    prediction = [1, 2, 50, 1, 2, 60, 1, 2, 70]
    drafter = PredictionDrafter(prediction, 0)
    assert drafter.propose([1, 2, 50, 9, 1, 2], 1).tokens.tolist() == [60]
    assert drafter.propose([1, 2, 50, 9, 1, 2, 9, 9, 1, 2], 1).tokens.tolist() == [60]
    assert PredictionDrafter(prediction, 0).propose([9, 9, 1, 2], 1).tokens.tolist() == [50]


def test_the_prompt_is_no_answer() -> None:
    drafter = PredictionDrafter([1, 2, 3, 4], 4)
    assert drafter.propose([1, 2, 3, 9], 2).tokens.tolist() == [1, 2]


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 9))
def test_proposals_come_from_the_prediction_and_counts_add_up(
    prediction: list[int], answer: list[int], budget: int
) -> None:
    drafter = PredictionDrafter(prediction, 0)
    for end in range(len(answer) + 1):
        draft = drafter.propose(answer[:end], budget)
        if draft is not None:
            tokens = draft.tokens.tolist()
            assert 0 < len(tokens) <= budget
            assert any(prediction[i : i + len(tokens)] == tokens for i in range(len(prediction)))
    assert 0 <= drafter.accepted <= len(answer)
    assert drafter.rejected == max(0, len(prediction) - drafter.accepted)


def test_confidence_falls_with_misses() -> None:
    drafter = PredictionDrafter(PREDICTION, 0)
    first = drafter.propose([], 1).probabilities[0]
    answer = [100, 101, 7, 101, 102, 7, 102, 103, 7, 103, 104]
    assert drafter.propose(answer, 1).probabilities[0] < first


def test_the_suffix_drafter_asks_the_cache() -> None:
    fixed = Fixed(chain_draft([1], 0.5, Source.SHARED))
    assert SuffixDrafter(fixed).propose([1, 2], 7) is fixed.fixed
    assert fixed.asked[0][0] == 7


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """A legal tree: distinct siblings, probabilities that fall along paths."""
    edges: dict[tuple[int, int], None] = {}
    parents, tokens, chances = [], [], []
    for _ in range(draw(st.integers(0, 8))):
        parent, token = draw(st.integers(-1, len(tokens) - 1)), draw(st.integers(0, 2))
        if (parent, token) in edges:
            continue
        edges[parent, token] = None
        parents.append(parent)
        tokens.append(token)
        chances.append((chances[parent] if parent >= 0 else 1.0) * draw(st.sampled_from([1.0, 0.5, 0.25])))
    return make_draft(tokens, parents, chances, [0] * len(tokens), [0] * len(tokens))


def paths(draft: Draft) -> dict[tuple[int, ...], float]:
    known: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        known.append((*(known[parent] if parent >= 0 else ()), token))
    assert len(set(known)) == len(known), "siblings must be distinct"
    return dict(zip(known, draft.probabilities.tolist(), strict=True))


@given(drafts(), drafts(), drafts())
def test_a_merged_tree_has_every_path_once_with_its_best_probability(a: Draft, b: Draft, c: Draft) -> None:
    given_drafts = [draft for draft in (a, b, c) if len(draft)]
    if not given_drafts:
        return
    want: dict[tuple[int, ...], float] = {}
    for draft in given_drafts:
        for key, chance in paths(draft).items():
            want[key] = max(chance, want.get(key, 0.0))
    merged = merge(given_drafts)
    assert paths(merged) == want
    assert all(parent < node for node, parent in enumerate(merged.parents.tolist()))
    for node, parent in enumerate(merged.parents.tolist()):
        assert parent < 0 or merged.probabilities[node] <= merged.probabilities[parent]


def test_merging_asks_everyone_and_skips_silence() -> None:
    chain = chain_draft([1, 2], 0.9, Source.PREDICTION)
    empty = chain_draft([], 0.9, Source.SESSION)
    assert MergedDrafter([Fixed(None), Fixed(empty), Fixed(chain)]).propose([], 4) is chain
    assert MergedDrafter([Fixed(None), Fixed(empty)]).propose([], 4) is None
    both = MergedDrafter([Fixed(chain), Fixed(chain_draft([1, 3], 0.5, Source.SHARED))]).propose([], 4)
    assert both.tokens.tolist() == [1, 2, 3]
    assert both.source.tolist() == [Source.PREDICTION, Source.PREDICTION, Source.SHARED]


def test_drafts_have_the_documented_types() -> None:
    draft = chain_draft([5, 6], 0.5, Source.PREDICTION)
    assert [array.dtype for array in (draft.tokens, draft.parents, draft.probabilities, draft.match_length)] == [
        np.int32, np.int32, np.float32, np.int32,
    ]  # fmt: skip
    assert draft.source.dtype == np.uint8
    assert draft.probabilities.tolist() == pytest.approx([0.5, 0.25])
