"""Draft chains of many requests in one call, against the same in plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache.index import Chain, ChainTurn, Sourced, StepCurve, propose_chains
from agentspec.cache.tokens import EMPTY, Tokens
from agentspec.errors import InvalidRequestError
from agentspec.speculation.governor import allocate_budget
from agentspec.types import Source
from tests.cache.native_index import NativeDrafter, NativeIndex

FREE = StepCurve(np.array([1.0, 2.0]), np.array([1.0, 1.0]))
LAST = 4  # token of the model's vocabulary


def tokens(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


@dataclass
class PlainChain:
    """A chain in plain Python."""

    tokens: list[int] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def advance(self, fresh: list[int]) -> None:
        equal = [one == other for one, other in zip(self.proposed, fresh, strict=False)]
        self.accepted = equal.index(False) if False in equal else len(equal)
        if not fresh:
            return
        self.proposed = []
        count = len(fresh)
        if count >= len(self.tokens) or self.tokens[:count] != fresh:
            self.tokens, self.acceptance = [], []
            return
        reached = self.acceptance[count - 1]
        self.tokens, self.acceptance = self.tokens[count:], [likely / reached for likely in self.acceptance[count:]]

    def replace(self, found: list[int], acceptance: list[float]) -> None:
        known = next((i for i, token in enumerate(found) if token > LAST), len(found))
        self.tokens, self.acceptance = found[:known], acceptance[:known]


falling = st.lists(st.integers(1, 100), max_size=8).map(lambda worth: [w / 100 for w in sorted(worth, reverse=True)])
rising = st.lists(st.integers(0, 40), min_size=1, max_size=6).map(lambda rise: np.cumsum(rise) / 10 + 1.0)
steps = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=6),
        st.integers(0, 10),
        st.sampled_from([1.0, 0.5]),
        st.booleans(),
        st.sampled_from([0.0, 0.0, 1.0, 1.3, 2.7, 4.1, np.inf]),
    ),
    min_size=1,
    max_size=4,
)


@given(
    text=st.lists(st.integers(0, 6), max_size=40),
    given_=st.lists(falling, max_size=3),
    rounds=st.lists(steps, max_size=4),
    seconds=rising,
    floor=st.sampled_from([0.0, 0.2]),
)
def test_a_step_is_that_of_plain_python(
    text: list[int],
    given_: list[list[float]],
    rounds: list[list[tuple[list[int], int, float, bool, float]]],
    seconds: np.ndarray,
    floor: float,
) -> None:
    """Chains that are followed, searched for, cut and shortened over several steps, each with some of the requests."""
    cost = StepCurve(np.arange(len(seconds), dtype=np.float64) * 3 + 1, seconds)
    index, drafter = NativeIndex(), NativeDrafter()
    indexes: list[Sourced] = [(index, Source.SHARED)]
    index.append(0, text)
    chains, plain = [Chain() for _ in range(4)], [PlainChain() for _ in range(4)]
    for chain, other, acceptance in zip(chains, plain, given_, strict=False):
        chain.replace([1] * len(acceptance), acceptance)
        other.replace([1] * len(acceptance), acceptance)
    for asked in rounds:
        turns = []
        for chain, other, (fresh, limit, factor, search, required) in zip(chains, plain, asked, strict=False):
            chain.advance(tokens(*fresh))
            other.advance(fresh)
            assert (chain.drafted, chain.accepted) == (other.drafted, other.accepted)
            assert (chain.tokens, chain.acceptance) == (other.tokens, other.acceptance)
            found_by = drafter if search else None
            turns.append(ChainTurn(chain, found_by, indexes, tokens(*fresh), limit, factor, required))
            if search:
                least = floor / len(asked) if required > 1 else floor
                draft = drafter.draft(indexes, fresh, limit, least, chain=True)
                other.replace(draft.tokens.tolist(), draft.probabilities.tolist())
        chances = [
            [t.factor * likely for likely in other.acceptance[: t.limit]]
            for t, other in zip(turns, plain, strict=False)
        ]
        seconds_by_drafted = np.interp(len(turns) + np.arange(100), *cost)
        needs = [turn.required for turn in turns]
        counts = allocate_budget(chances, len(turns), seconds_by_drafted.__getitem__, needs)
        found = propose_chains(turns, cost, floor=floor, vocabulary=LAST + 1)
        for other, count in zip(plain, counts, strict=False):
            other.proposed, other.drafted = other.tokens[:count], count
        assert found == [other.proposed for other in plain[: len(turns)]]
        for chain, chance, count in zip(chains, chances, counts, strict=False):
            assert chain.expected == pytest.approx(sum(chance[:count]))


@given(
    likely=st.lists(falling, min_size=1, max_size=4),
    needs=st.lists(st.floats(-3.0, 1.0), min_size=4, max_size=4),
    seconds=rising,
)
def test_who_needs_no_more_than_a_token_changes_nothing(
    likely: list[list[float]], needs: list[float], seconds: np.ndarray
) -> None:
    cost = StepCurve(np.arange(len(seconds), dtype=np.float64) * 3 + 1, seconds)

    def proposed(needs: list[float]) -> list[list[int]]:
        turns = []
        for acceptance, need in zip(likely, needs, strict=False):
            chain = Chain()
            chain.replace(list(range(len(acceptance))), acceptance)
            turns.append(ChainTurn(chain, None, (), EMPTY, 8, 1.0, need))
        return propose_chains(turns, cost)

    assert proposed(needs) == proposed([0.0] * 4)


def test_who_is_late_is_served_first() -> None:
    """Steps in which nothing pays for goodput, and a request that gains from itself all the same."""
    dear = StepCurve(np.array([2.0, 8.0]), np.array([1.0, 4.0]))
    two = StepCurve(np.array([2.0, 4.0, 5.0]), np.array([1.0, 1.2, 9.0]))  # further tokens that a step has room for

    def drafted(cost: StepCurve, first: float, second: float) -> list[int]:
        turns = []
        for need in (first, second):
            chain = Chain()
            chain.replace([1, 2, 3], [0.9, 0.85, 0.5])
            turns.append(ChainTurn(chain, None, (), EMPTY, 3, 1.0, need))
        return [len(chain) for chain in propose_chains(turns, cost)]

    assert drafted(dear, 0.0, 1.0) == [0, 0]
    assert drafted(dear, 0.0, 1.5) == [0, 1]
    assert drafted(dear, 0.0, 9.0) == [0, 2]  # a third would make the step longer by more than the answer
    assert drafted(two, 0.0, 0.0) == drafted(two, 1.5, 1.5) == [1, 1]
    assert drafted(two, 2.0, 1.5) == [2, 0] and drafted(two, 1.5, 2.0) == [0, 2]


def test_a_late_request_is_searched_for_less_likely_tokens() -> None:
    """A token pays for its own request where it would not pay for all requests of the step."""
    index = NativeIndex()
    for end in range(2, 6):
        index.append(end, [7, 1, end] * 2)

    def found(required: float) -> int:
        turns = [ChainTurn(Chain(), NativeDrafter(), [(index, Source.SHARED)], tokens(7, 1), 4, 1.0, required)]
        turns += [ChainTurn(Chain(), None, (), EMPTY, 4, 1.0) for _ in range(7)]
        return len(propose_chains(turns, FREE, floor=0.9)[0])

    assert found(0.0) == 0 < found(5.0)


def test_nothing_is_left_of_a_chain_that_came_true_against_all_odds() -> None:
    chain = Chain()
    chain.replace([1, 2], [0.0, 0.0])
    chain.advance(tokens(1))
    assert (chain.tokens, chain.acceptance) == ([], [])


def test_certain_is_what_is_long_and_likely() -> None:
    chain = Chain()
    assert not chain.is_certain(0, 0.0)
    chain.replace([1, 2], [0.9, 0.1])
    assert chain.is_certain(2, 0.9) and not chain.is_certain(3, 0.9) and not chain.is_certain(2, 0.95)


def test_what_cannot_be_is_refused_and_changes_no_chain() -> None:
    chain = Chain()
    chain.replace([1], [0.5])
    index = NativeIndex()
    twice = [(index, Source.SHARED), (index, Source.SHARED)]
    for turn, cost in (
        (ChainTurn(chain, NativeDrafter(), twice, tokens(1), 4, 1.0), FREE),
        (ChainTurn(chain, NativeDrafter(), [(index, 99)], tokens(1), 4, 1.0), FREE),
        (ChainTurn(chain, NativeDrafter(), [], tokens(-1), 4, 1.0), FREE),
        (ChainTurn(chain, None, (), EMPTY, 4, 1.0), StepCurve(np.zeros(0), np.zeros(0))),
        (ChainTurn(chain, None, (), EMPTY, 4, 1.0), StepCurve(np.zeros(2), np.zeros(1))),
    ):
        with pytest.raises(InvalidRequestError):
            propose_chains([turn], cost)
    assert (chain.tokens, chain.drafted) == ([1], 0)
    assert propose_chains([], FREE) == []


def test_time_that_is_up_takes_nothing_away() -> None:
    """A longer chain that is known stays, and one that is searched for in time may become shorter."""
    index, chain = NativeIndex(), Chain()
    index.append(0, list(range(1, 6)))
    chain.replace([4, 5, 6, 7], [0.9, 0.8, 0.7, 0.6])
    turn = ChainTurn(chain, NativeDrafter(), [(index, Source.SHARED)], tokens(1, 2, 3), 32, 1.0)
    assert propose_chains([turn], FREE, patience=0.0) == [[4, 5, 6, 7]]
    assert propose_chains([turn], FREE, patience=1e9) == [[4, 5]]
