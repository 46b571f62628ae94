"""Drafts made safe: only ids the model has, within the budget, whole paths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.drafters.base import Drafter, draft_alone, make_draft
from agentspec.backends.torch.engine.speculator import (
    NOTHING,
    Proposal,
    Speculator,
    StepEstimate,
    depth_first,
    subtree,
    usable,
)
from agentspec.backends.torch.engine.stats import Counters
from agentspec.speculation.governor import Governor, best_nodes
from agentspec.types import Draft


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask a drafter takes 0.1 ms, however busy the machine is."""
    readings = itertools.count()
    monkeypatch.setattr("agentspec.backends.torch.engine.speculator.perf_counter", lambda: next(readings) * 1e-4)


@given(st.lists(st.tuples(st.integers(-3, 12), st.floats(0, 1)), max_size=20), st.integers(0, 20), st.data())
def test_what_is_left_is_legal_closed_and_within_budget(
    nodes: list[tuple[int, float]], budget: int, data: st.DataObject
) -> None:
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(nodes))]
    tokens = [token for token, _ in nodes]
    draft = make_draft(tokens, parents, [p for _, p in nodes], [0] * len(nodes), [1] * len(nodes))
    kept = usable(draft, 10, budget)
    assert len(kept.tokens) <= budget
    assert all(0 <= token < 10 for token in kept.tokens)
    assert all(-1 <= parent < node for node, parent in enumerate(kept.parents))
    legal = legal_paths(tokens, parents)
    assert legal_paths(kept.tokens, kept.parents) <= legal
    if budget >= len(nodes):
        assert len(kept.tokens) == sum(node_is_legal(tokens, parents, node) for node in range(len(tokens)))


def node_is_legal(tokens: Sequence[int], parents: Sequence[int], node: int) -> bool:
    return node < 0 or (0 <= tokens[node] < 10 and node_is_legal(tokens, parents, parents[node]))


def legal_paths(tokens: Sequence[int], parents: Sequence[int]) -> set[tuple[int, ...]]:
    def path(node: int) -> tuple[int, ...]:
        return () if node < 0 else (*path(parents[node]), tokens[node])

    return {path(node) for node in range(len(tokens)) if node_is_legal(tokens, parents, node)}


class Scripted(Drafter):
    def __init__(self, draft: Draft | None) -> None:
        self.draft, self.calls = draft, 0

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        self.calls += 1
        return self.draft


def proposer(draft: Draft | None, **costs: Any) -> tuple[Speculator, Scripted, Counters]:
    drafter, counters, governor = Scripted(draft), Counters(), Governor()
    governor.cost.calibrate([(1, 0, 1.0), (48, 0, 1.2)])
    return Speculator(drafter, governor, counters, 100), drafter, counters


def chain(tokens: list[int], chance: float, source: int = 0) -> Draft:
    count = len(tokens)
    return make_draft(tokens, range(-1, count - 1), [chance] * count, [1] * count, [source] * count)


BILL = StepEstimate(plain=1.0, drafts=0.05, token=1.0)


class Broken(Scripted):
    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        super().propose(context, budget)
        raise MemoryError("a prompt")


def test_a_drafter_that_fails_costs_the_answer_its_drafts_only(caplog: pytest.LogCaptureFixture) -> None:
    subject, _, counters = proposer(None)
    subject._drafter = broken = Broken(None)
    assert (
        draft_alone(subject.proposing([5, 6], 10)) is NOTHING and draft_alone(subject.proposing([5, 6], 10)) is NOTHING
    )
    subject.observe(NOTHING, [], BILL)
    assert (broken.calls, counters.draft_failures, subject.speculation.steps) == (1, 1, 1)  # type: ignore[union-attr]
    assert "MemoryError" in caplog.text and "a prompt" not in caplog.text


@given(st.data())
def test_the_likeliest_path_comes_first(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
    worth: list[float] = []
    for parent in parents:
        worth.append((worth[parent] if parent >= 0 else 1.0) * data.draw(st.sampled_from([0.9, 0.5, 0.1])))
    whole = Proposal(range(count), parents, worth, [0] * count, worth)
    kept = best_nodes(worth, data.draw(st.integers(0, count)))
    order = depth_first(whole, kept)
    assert sorted(order) == sorted(kept)
    path, node = list[int](), -1
    while children := [child for child in kept if parents[child] == node]:
        node = max(children, key=lambda child: (worth[child], -child))
        path.append(node)
    assert order[: len(path)] == path
    part = subtree(whole, order)
    assert all(parent < node for node, parent in enumerate(part.parents))
    assert [part.tokens[parent] if parent >= 0 else -1 for parent in part.parents] == [parents[n] for n in order]
