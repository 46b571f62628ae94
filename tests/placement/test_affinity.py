"""The policies that know prefixes and sessions: bounded loads, affinity while it pays, and little work a choice."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.placement import POLICIES, Call, Member, PrefixAffinity, Roster, WorkflowAffinity
from agentspec.placement.workflow import FEW

CALLS = st.lists(
    st.builds(
        Call,
        session=st.none() | st.sampled_from(["s1", "s2", "s3"]),
        workflow=st.none() | st.sampled_from(["w1", "w2"]),
        blocks=st.sampled_from([(), (1,), (1, 2), (1, 2, 3), (4,), (4, 5)]),
    ),
    max_size=40,
)


def _play(policy, calls, members):
    """Place calls that never end; returns the names chosen and the loads."""
    members, chosen = {member.name: member for member in members}, []
    for call in calls:
        member = policy.choose(call, list(members.values()))
        chosen.append(member.name)
        members[member.name] = replace(member, in_flight=member.in_flight + 1)
        policy.placed(call, members[member.name])
    return chosen, members


@given(CALLS, st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=5))
def test_no_member_gets_more_than_its_bounded_share(calls, weights):
    bound = 2.5  # the largest of any rule: where sessions stay
    members = [Member(f"m{number}", weight) for number, weight in enumerate(weights)]
    for policy, few in ((WorkflowAffinity(crowded=bound), FEW), (PrefixAffinity(bound=bound), 0)):
        _, loaded = _play(policy, calls, members)
        for member in loaded.values():
            share = ceil(bound * len(calls) * member.weight / sum(weights))
            assert member.in_flight <= max(few * member.weight, share)


@pytest.mark.parametrize("name", POLICIES)
@given(CALLS)
def test_a_choice_is_one_of_the_members_that_may_take_calls(name, calls):
    policy = POLICIES[name]()
    for number, call in enumerate(calls):
        there = [Member("a"), Member("b"), Member("c")][: 1 + number % 3]
        member = policy.choose(call, there)
        assert member in there
        policy.placed(call, member)
        if number % 5 == 4:
            policy.removed("a")


def test_a_session_stays_until_its_server_is_crowded():
    policy = WorkflowAffinity()
    idle = [Member("a", in_flight=2), Member("b", in_flight=2), Member("c", in_flight=2)]
    call = Call(session="s", blocks=(1, 2))
    home = policy.choose(call, idle)
    policy.placed(call, home)
    longer = Call(session="s", blocks=(1, 2, 3))
    busy = [replace(one, in_flight=4) if one.name == home.name else one for one in idle]
    assert policy.choose(longer, busy).name == home.name
    crowded = [replace(one, in_flight=20) if one.name == home.name else one for one in idle]
    assert policy.choose(longer, crowded).name != home.name


def test_a_session_whose_server_died_goes_on_elsewhere_and_stays_there():
    policy = WorkflowAffinity()
    call = Call(session="s", blocks=(1,))
    both = [Member("a"), Member("b")]
    home = policy.choose(call, both)
    policy.placed(call, home)
    policy.removed(home.name)
    (other,) = [one for one in both if one.name != home.name]
    policy.placed(call, policy.choose(call, [other]))
    assert policy.choose(call, both).name == other.name


def test_the_ring_forgets_servers_that_left_without_a_word():
    policy = WorkflowAffinity()
    for number in range(40):
        members = [Member(f"pod-{number}"), Member("kept")]
        policy.placed(call := Call(session=f"s{number}"), policy.choose(call, members))
    assert len(policy._ring) <= 4 * 2 + 2


def test_branches_follow_their_trunk_while_there_is_room():
    trunk, other = tuple(range(8)), tuple(range(20, 28))
    policy = WorkflowAffinity()
    members = [Member("a", in_flight=3), Member("b", in_flight=3)]
    policy.placed(Call(workflow="run", blocks=trunk), members[1])
    policy.placed(Call(blocks=other), members[0])
    branches = [Call(workflow="run", session=f"branch {n}", blocks=(*trunk, 100 + n)) for n in range(12)]
    chosen, _ = _play(policy, branches, members)
    assert chosen[:2] == ["b", "b"]
    assert set(chosen) == {"a", "b"}


def test_a_prefix_that_two_servers_have_keeps_no_session_from_its_home():
    policy, members = WorkflowAffinity(), [Member(name) for name in "abc"]
    fresh = Call(session="s", blocks=(1, 2, 3))
    home = WorkflowAffinity().choose(fresh, members).name
    first, second = (member for member in members if member.name != home)
    policy.placed(Call(session="t", blocks=(1, 2)), first)
    assert policy.choose(fresh, members) == first
    policy.placed(Call(session="u", blocks=(1, 2)), second)
    assert policy.choose(fresh, members).name == home


def test_a_server_with_few_calls_keeps_its_sessions():
    """However idle the others are: to read a context anew costs more than to share a batch with two."""
    policy, idle = WorkflowAffinity(), [Member(name) for name in "abcdefgh"]
    policy.placed(call := Call(session="s"), idle[0])
    for calls, stays in ((3, True), (4, False)):
        members = [Member("a", in_flight=calls), *idle[1:]]
        assert (policy.choose(call, members).name == "a") is stays


def _busy_home(policy, session, **busy):
    """The servers, with that busy to which `policy` gives the session while all are idle."""
    idle = [Member(name, others=4) for name in "abcd"]
    home = policy.choose(Call(session=session), idle).name
    return home, [replace(member, **busy) if member.name == home else member for member in idle]


def test_a_busy_home_is_passed_over_unless_other_gateways_may_have_used_it():
    alone = WorkflowAffinity()
    home, members = _busy_home(alone, "s", in_flight=2)
    assert alone.choose(Call(session="s"), [replace(member, others=0) for member in members]).name != home
    for _ in range(10):  # it takes a while until there seem to be other gateways
        alone.choose(Call(session="t"), members)
    assert alone.choose(Call(session="s"), members).name == home
    _, crowded = _busy_home(alone, "s", in_flight=12)
    assert alone.choose(Call(session="s"), crowded).name != home
    _, queue = _busy_home(alone, "s", in_flight=1, waiting=1)
    assert alone.choose(Call(session="s"), queue).name != home


def test_sessions_of_one_call_go_to_the_freest_server():
    members = [
        Member("a", in_flight=9, others=9),
        Member("b", in_flight=8, others=9),
        Member("c", in_flight=9, others=9),
    ]
    single, chats = WorkflowAffinity(), WorkflowAffinity()
    for number in range(600):
        call = Call(session=f"s{number}", workflow="w", begins=True)
        single.placed(call, members[number % 3])
        chats.placed(call, members[number % 3])
        chats.placed(replace(call, begins=False), members[number % 3])
    new = [Call(session=f"n{number}", workflow="w", begins=True) for number in range(30)]
    assert {single.choose(call, members).name for call in new} == {"b"}
    assert {single.choose(replace(call, begins=False), members).name for call in new} == {"a", "b", "c"}
    assert {chats.choose(call, members).name for call in new} == {"a", "b", "c"}


def test_what_shares_nothing_goes_to_the_freest():
    members = [Member("a", in_flight=4), Member("b", in_flight=1), Member("c", in_flight=2)]
    for policy in (PrefixAffinity(), WorkflowAffinity()):
        policy.placed(Call(blocks=(1, 2)), members[0])
        assert policy.choose(Call(blocks=(1, 7, 8)), members).name == "b"
        assert policy.choose(Call(), members).name == "b"


def test_new_sessions_are_placed_alike_in_every_process():
    program = (
        "from agentspec.placement import *\n"
        "policy, members = WorkflowAffinity(), [Member(f'm{n}', in_flight=n % 3) for n in range(10)]\n"
        "print(*(policy.choose(Call(session=str(n)), members).name for n in range(30)))"
    )
    said = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert said[0] == said[1]
    assert len(set(said[0].split())) > 3


class CountedMember(Member):
    """Counts how often its load is read."""

    __slots__ = ()
    reads = 0

    @property
    def load(self):
        CountedMember.reads += 1
        return super().load


@pytest.mark.parametrize("count", [10, 1000])
def test_a_choice_among_members_that_are_kept_costs_the_same_however_many_there_are(count):
    roster = Roster([CountedMember(f"m{number}") for number in range(count)])
    policy = WorkflowAffinity()
    policy.choose(Call(), roster)
    CountedMember.reads = 0
    for number in range(200):
        call = Call(session=f"s{number % 40}", blocks=(1, 2, number % 40 + 10))
        member = policy.choose(call, roster)
        roster.update(CountedMember(member.name, in_flight=member.in_flight + 1))
        policy.placed(call, member)
    assert CountedMember.reads / 200 < 40
