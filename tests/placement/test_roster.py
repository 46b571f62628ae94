"""A roster that is told of changes knows what one made anew would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentspec.placement import Call, LeastLoaded, Member, Roster

LOADS = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([0.5, 1.0, 2.0]), st.floats(0, 1)), min_size=1, max_size=12
)
CHANGES = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 30), st.integers(0, 5)), max_size=60)


def _members(loads):
    return [Member(f"m{n}", weight, calls, kv_use=use) for n, (calls, weight, use) in enumerate(loads)]


@given(LOADS, CHANGES)
def test_updates_equal_a_new_roster(loads, changes):
    members = _members(loads)
    roster = Roster(members)
    for place, calls, extra in changes:
        place %= len(members)
        old = members[place]
        members[place] = Member(old.name, old.weight, calls, extra // 2, extra, old.kv_use)
        roster.update(members[place])
        assert roster.freest() == LeastLoaded().choose(Call(), members)
    assert list(roster) == members
    fresh = Roster(members)
    assert [roster.has_room(one, 1.25) for one in roster] == [fresh.has_room(one, 1.25) for one in fresh]
    assert roster.others_share == fresh.others_share


def test_room_is_measured_by_what_the_others_carry():
    """Of two servers one may hold two thirds, else twice the average would be all there is."""
    held = [Roster([Member("a", in_flight=calls), Member("b", others=12 - calls)]) for calls in range(13)]
    assert [roster.has_room(roster[0], 2.0) for roster in held] == [True] * 9 + [False] * 4
    assert held[3].others_share == 0.75


@given(LOADS, st.floats(1, 3))
def test_the_freest_always_has_room(loads, factor):
    roster = Roster(_members(loads))
    assert roster.has_room(roster.freest(), factor)


def test_members_are_found_by_name():
    roster = Roster([Member("a"), Member("b", in_flight=2)])
    assert roster.find("b") == Member("b", in_flight=2)
    assert roster.find("c") is None
    assert roster.find(None) is None
    assert Roster.of(roster) is roster
