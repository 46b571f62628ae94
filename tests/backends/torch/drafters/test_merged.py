"""Trees laid over each other."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.drafters import Drafter, MergedDrafter, chain_draft, make_draft, merge
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


def test_merging_asks_everyone_and_skips_silence() -> None:
    chain = chain_draft([1, 2], 0.9, Source.PREDICTION)
    empty = chain_draft([], 0.9, Source.SESSION)
    assert MergedDrafter([Fixed(None), Fixed(empty), Fixed(chain)]).propose([], 4) is chain
    assert MergedDrafter([Fixed(None), Fixed(empty)]).propose([], 4) is None
    both = MergedDrafter([Fixed(chain), Fixed(chain_draft([1, 3], 0.5, Source.SHARED))]).propose([], 4)
    assert both.tokens.tolist() == [1, 2, 3]
    assert both.source.tolist() == [Source.PREDICTION, Source.PREDICTION, Source.SHARED]


def test_closing_reaches_all() -> None:
    drafters = [Fixed(None), Fixed(None)]
    MergedDrafter(drafters).close()
    assert all(drafter.closed for drafter in drafters)
