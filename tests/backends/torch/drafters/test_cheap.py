"""Drafters that need no model, and the merged tree of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.drafters.base import Drafter, make_draft
from agentspec.backends.torch.drafters.combined import ConstrainedDrafter, PredictionDrafter, merge
from agentspec.backends.torch.grammars.grammar import GrammarCompiler
from agentspec.types import Draft, Source


class Fixed(Drafter):
    def __init__(self, draft: Draft | None) -> None:
        self.fixed, self.closed = draft, False

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        return self.fixed

    def close(self) -> None:
        self.closed = True


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


PROMPT = [900, 901]
PREDICTION = list(range(100, 130))


def proposed(drafter: PredictionDrafter, answer: Sequence[int], budget: int = 5) -> list[int]:
    draft = drafter.propose([*PROMPT, *answer], budget)
    return [] if draft is None else draft.tokens.tolist()


def test_a_prediction_begins_at_its_beginning_and_is_followed() -> None:
    drafter = PredictionDrafter(PREDICTION, len(PROMPT))
    assert proposed(drafter, []) == PREDICTION[:5]
    assert proposed(drafter, PREDICTION[:7]) == PREDICTION[7:12]
    assert proposed(drafter, PREDICTION) == []
    assert (drafter.accepted, drafter.rejected) == (30, 0)


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


@pytest.fixture(scope="module")
def grammars(byte_tokens: Any) -> GrammarCompiler:
    return GrammarCompiler(byte_tokens, 259, [256])


def test_forbidden_nodes_are_cut_and_forced_tokens_added(grammars: GrammarCompiler, byte_tokens: Any) -> None:
    state = grammars.compile('start: ("x" | "yes") "!"', param="p").start()
    x, y, e, s, bang = byte_tokens.encode("xyes!")
    draft = make_draft([x, y, bang, s], [-1, -1, 0, 1], [0.5, 0.5, 0.4, 0.4], [1] * 4, [Source.SHARED] * 4)
    cut = ConstrainedDrafter(Fixed(draft), state).propose([], 8)
    assert cut is not None and cut.tokens.tolist() == [x, y, bang] and cut.parents.tolist() == [-1, -1, 0]
    state.advance(y)
    forced = ConstrainedDrafter(Fixed(None), state).propose([], 8)
    assert forced is not None and forced.tokens.tolist()[:2] == [e, s]
    assert set(forced.source.tolist()) == {Source.GRAMMAR} and np.all(np.diff(forced.probabilities) <= 0)
    shorter = ConstrainedDrafter(Fixed(None), state).propose([], 1)
    assert shorter is not None and len(shorter) == 1
    free = grammars.compile("start: /(.|\\n)*/", param="p").start()
    assert ConstrainedDrafter(Fixed(None), free).propose([], 8) is None
