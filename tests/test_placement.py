"""Which server takes a call: bounded loads, affinity while it pays, the longest known prefix in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.placement import (
    BLOCK_BYTES,
    CROWDED,
    FEW,
    ITEMS,
    MAX_BLOCKS,
    MOST_PIECES,
    POLICIES,
    Call,
    Member,
    PrefixTable,
    WorkflowAffinity,
    block_hashes,
    prompt_pieces,
    rank,
    scoped_call,
)

CALLS = st.lists(
    st.builds(
        Call,
        session=st.none() | st.sampled_from(["s1", "s2", "s3"]),
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


@given(CALLS, st.integers(1, 5))
def test_no_member_gets_more_than_its_bounded_share(calls, count):
    members = [Member(f"m{number}") for number in range(count)]
    _, loaded = _play(WorkflowAffinity(), calls, members)
    assert all(member.in_flight <= max(FEW, ceil(CROWDED * len(calls) / count)) for member in loaded.values())


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


def test_a_session_stays_until_its_server_is_crowded_or_gone():
    policy = WorkflowAffinity()
    idle = [Member(name, in_flight=2) for name in "abc"]
    call = Call(session="s", blocks=(1, 2))
    home = policy.choose(call, idle)
    policy.placed(call, home)
    longer = Call(session="s", blocks=(1, 2, 3))

    def chosen(load):
        return policy.choose(longer, [replace(one, in_flight=load) if one.name == home.name else one for one in idle])

    assert chosen(4).name == home.name and chosen(20).name != home.name
    policy.removed(home.name)
    other = policy.choose(call, [one for one in idle if one.name != home.name])
    policy.placed(call, other)
    assert policy.choose(call, idle).name == other.name


@pytest.mark.parametrize("count", [2, 3, 5])
def test_homes_are_spread_and_stay_when_a_server_leaves(count):
    members = [Member(f"m{number}") for number in range(count)]
    homes = {f"s{n}": max(members, key=lambda one: rank(f"s{n}", one)).name for n in range(2000)}
    for member in members:
        share = sum(home == member.name for home in homes.values()) / 2000
        assert abs(share - 1 / count) < 0.06
    left = members[1:]
    after = {session: max(left, key=lambda one: rank(session, one)).name for session in homes}
    assert all(after[session] == home for session, home in homes.items() if home != "m0")


def _busy_home(policy, session, **busy):
    """The servers, with that busy to which `policy` gives the session while all are idle."""
    idle = [Member(name, others=4) for name in "abcd"]
    home = policy.choose(Call(session=session), idle).name
    return home, [replace(member, **busy) if member.name == home else member for member in idle]


def test_a_busy_home_is_passed_over_unless_other_gateways_may_have_used_it():
    alone = WorkflowAffinity()
    home, members = _busy_home(alone, "s", in_flight=2)
    assert alone.choose(Call(session="s"), [replace(member, others=0) for member in members]).name != home
    assert alone.choose(Call(session="s"), members).name == home
    _, crowded = _busy_home(alone, "s", in_flight=12)
    assert alone.choose(Call(session="s"), crowded).name != home
    _, queue = _busy_home(alone, "s", in_flight=1, waiting=1)
    assert alone.choose(Call(session="s"), queue).name != home


def test_new_sessions_are_placed_alike_in_every_process():
    program = (
        "from agentspec.placement import Call, Member, WorkflowAffinity\n"
        "policy, members = WorkflowAffinity(), [Member(f'm{n}', in_flight=n % 3) for n in range(10)]\n"
        "print(*(policy.choose(Call(session=str(n)), members).name for n in range(30)))"
    )
    said = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert said[0] == said[1]
    assert len(set(said[0].split())) > 3


PROMPTS = st.lists(st.tuples(st.text("ab", min_size=1, max_size=6), st.sampled_from("xyz")), max_size=40)


def _blocks(prompt):
    """A hash for each prefix, as gateways send them."""
    return [hash(prompt[: end + 1]) for end in range(len(prompt))]


@given(PROMPTS, st.text("ab", max_size=6))
def test_the_match_is_the_longest_prefix_that_was_sent(sent, prompt):
    table = PrefixTable()
    for text, name in sent:
        table.sent(_blocks(text), name)
    known, holders = table.match(_blocks(prompt))
    longest = max(
        (n for n in range(len(prompt) + 1) if n and any(t.startswith(prompt[:n]) for t, _ in sent)), default=0
    )
    assert known == longest
    if longest:
        assert set(holders) == {name for text, name in sent if text.startswith(prompt[:longest])}


@given(PROMPTS, st.integers(1, 6))
def test_the_known_blocks_are_bounded_and_always_a_prefix(sent, room):
    table = PrefixTable(room)
    for text, name in sent:
        table.sent(_blocks(text), name)
        assert len(table) <= room
    for text, _ in sent:
        known = [table.match([block])[0] for block in _blocks(text)]
        assert known == sorted(known, reverse=True)


@given(PROMPTS)
def test_a_member_that_lost_its_cache_holds_nothing(sent):
    table, without = PrefixTable(), PrefixTable()
    for text, name in sent:
        table.sent(_blocks(text), name)
        if name != "x":
            without.sent(_blocks(text), name)
    table.forget("x")
    assert len(table) == len(without)
    assert all("x" not in table.match(_blocks(text))[1] for text, _ in sent)


@given(st.binary(max_size=5000), st.binary(max_size=3000), st.integers(1, 999))
def test_equal_beginnings_have_equal_blocks_however_the_text_is_cut(text, more, size):
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    whole = list(block_hashes("t", [text]))
    assert whole == list(block_hashes("t", pieces)) == list(block_hashes("t", [text, more]))[: len(whole)]
    assert len(whole) == len(text) // BLOCK_BYTES
    assert not set(whole) & set(block_hashes("other tenant", [text]))
    assert scoped_call("t", "s").session != scoped_call("other tenant", "s").session


def test_of_long_prompts_the_beginning_is_read():
    pieces = iter([bytes(BLOCK_BYTES)] * 4 * MAX_BLOCKS)
    blocks = list(block_hashes("t", pieces))
    assert len(blocks) == MAX_BLOCKS and len(list(pieces)) == 3 * MAX_BLOCKS and blocks[0] != blocks[1]


def test_a_chat_begins_as_its_next_turn_does():
    """Later messages change none of its blocks; other tools in front of them change all."""
    turns = [
        {"role": "user", "content": "x" * 3000},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    short, long = ({"messages": messages} for messages in (turns, [*turns, {"role": "user", "content": "y" * 3000}]))
    first, second = (list(block_hashes("t", prompt_pieces(fields))) for fields in (short, long))
    assert len(first) == 2 and second[:2] == first and len(second) == 5
    assert not set(first) & set(block_hashes("t", prompt_pieces({**short, "tools": [{"type": "function"}]})))


@pytest.mark.parametrize("item", [1, 54321, "", [], {}, [1, 2]])
def test_a_list_of_many_small_items_is_read_in_few_pieces(item):
    assert sum(1 for _ in prompt_pieces({"prompt": [item] * 200_000})) <= MOST_PIECES


def test_a_list_of_token_ids_begins_as_a_longer_one_does():
    """However many of them are encoded at once, and without taking 1, 2 for 12."""

    def text(ids):
        return b"".join(prompt_pieces({"prompt": ids}))

    ids = list(range(3 * ITEMS))
    for length in (1, ITEMS - 1, ITEMS, ITEMS + 1, 2 * ITEMS + 7):
        assert text(ids).startswith(text(ids[:length]))
    assert text([1, 2]) != text([12])
