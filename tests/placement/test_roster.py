"""Who has room, by what the others carry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentspec.placement import Member
from agentspec.placement.affinity import Roster

LOADS = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([0.5, 1.0, 2.0]), st.floats(0, 1)), min_size=1, max_size=12
)


def _members(loads):
    return [Member(f"m{n}", weight, calls, kv_use=use) for n, (calls, weight, use) in enumerate(loads)]


def test_room_is_measured_by_what_the_others_carry():
    """Of two servers one may hold two thirds, else twice the average would be all there is."""
    held = [Roster([Member("a", in_flight=calls), Member("b", others=12 - calls)]) for calls in range(13)]
    assert [roster.has_room(roster.members[0], 2.0) for roster in held] == [True] * 9 + [False] * 4
    assert held[3].others_share == 0.75


@given(LOADS, st.floats(1, 3))
def test_the_freest_always_has_room(loads, factor):
    roster = Roster(_members(loads))
    assert roster.has_room(roster.freest(), factor)


def test_members_are_found_by_name():
    roster = Roster([Member("a"), Member("b", in_flight=2)])
    assert roster.find("b") == Member("b", in_flight=2)
    assert roster.find("c") is None and roster.find(None) is None
