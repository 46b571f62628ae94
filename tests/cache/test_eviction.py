from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache.eviction import order
from agentspec.cache.index import Usage

rows = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 10_000), st.integers(1, 1 << 40)), max_size=40)


def usage(rows: list[tuple[int, int, int]]) -> Usage:
    lengths, hits, last_used = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Usage(np.arange(len(rows)), lengths, hits, last_used)


@given(rows)
def test_every_sequence_has_its_turn(rows: list[tuple[int, int, int]]) -> None:
    for policy in ("benefit", "lru"):
        assert sorted(order(usage(rows), policy)) == list(range(len(rows)))  # type: ignore[arg-type]


@given(rows)
def test_the_least_recently_used_goes_first(rows: list[tuple[int, int, int]]) -> None:
    used = usage(rows).last_used
    assert (np.diff(used[order(usage(rows), "lru")]) >= 0).all()


@given(rows.filter(lambda rows: len(rows) > 1), st.data())
def test_more_hits_or_a_later_use_or_fewer_bytes_never_hasten_it(
    rows: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    lengths, hits, last_used = rows[0]
    better = (data.draw(st.integers(1, lengths)), hits + data.draw(st.integers(0, 100)), last_used)
    both = usage([*rows, better])
    turn = np.argsort(order(both, "benefit"))
    assert turn[len(rows)] > turn[0]  # of equals, the one that came first goes first


def test_hits_keep_a_sequence_for_a_while_and_not_for_ever() -> None:
    fresh = [(100, 0, 1000 + i) for i in range(20)]
    assert order(usage([(100, 80, 950), *fresh, (100, 0, 940)]), "benefit")[0] == 21
    assert order(usage([(100, 80, 995), *fresh, (100, 0, 940)]), "benefit").tolist().index(0) > 5
    assert order(usage([(100, 80, 1), *fresh]), "benefit")[0] == 0
