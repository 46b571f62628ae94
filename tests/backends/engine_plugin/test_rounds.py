"""Who is searched for where a round has no time for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.engine_plugin.rounds import SearchOrder


@given(st.integers(1, 128), st.data())
def test_every_row_has_its_turn_within_as_many_rounds_as_it_takes_to_serve_all(rows: int, data: st.DataObject) -> None:
    served = data.draw(st.integers(1, rows))
    order = SearchOrder()
    rounds = [_served(order, rows, served) for _ in range(3 * -(-rows // served))]
    for start in range(len(rounds) - -(-rows // served) + 1):
        assert set().union(*rounds[start : start + -(-rows // served)]) == set(range(rows))


def _served(order: SearchOrder, rows: int, count: int) -> set[int]:
    """The rows that a round with time for `count` has reached."""
    searched = order.rows(rows)
    assert sorted(searched) == list(range(rows))
    order.reached(searched, [place < count for place in range(rows)])
    return set(searched[:count])


@given(st.lists(st.lists(st.booleans(), max_size=9), max_size=20))
def test_rows_may_come_and_go_and_find_nothing(rounds: list[list[bool]]) -> None:
    order = SearchOrder()
    for found in rounds:
        rows = order.rows(len(found))
        assert sorted(rows) == list(range(len(found)))
        order.reached(rows, found)
