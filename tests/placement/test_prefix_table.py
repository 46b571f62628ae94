"""The longest known prefix, in bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentspec.placement.prefix_table import ENTRY_BYTES, HOLDER_BYTES, MOST_HOLDERS, PrefixTable

PROMPTS = st.lists(st.tuples(st.text("ab", min_size=1, max_size=6), st.sampled_from("xyz")), max_size=40)


def _blocks(prompt):
    """A hash for each prefix, as gateways send them."""
    return [hash(prompt[: end + 1]) for end in range(len(prompt))]


@given(PROMPTS, st.text("ab", max_size=6))
def test_the_match_is_the_longest_prefix_that_was_sent(sent, prompt):
    table = PrefixTable()
    for text, name in sent:
        table.sent(_blocks(text), name)
    match = table.match(_blocks(prompt))
    longest = max(
        (n for n in range(len(prompt) + 1) if n and any(t.startswith(prompt[:n]) for t, _ in sent)), default=0
    )
    assert match.blocks == longest
    if longest:
        assert set(match.holders) == {name for text, name in sent if text.startswith(prompt[:longest])}


@given(PROMPTS, st.integers(1, 6))
def test_what_is_kept_is_bounded_and_always_a_prefix(sent, room):
    table = PrefixTable(room * (ENTRY_BYTES + HOLDER_BYTES))
    for text, name in sent:
        table.sent(_blocks(text), name)
        assert table.bytes <= room * (ENTRY_BYTES + HOLDER_BYTES)
        assert len(table) <= room
    for text, _ in sent:
        known = [table.match([block]).blocks for block in _blocks(text)]
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
    assert table.bytes == without.bytes
    assert all("x" not in table.match(_blocks(text)).holders for text, _ in sent)


def test_of_many_holders_the_latest_are_known():
    table = PrefixTable()
    for number in range(MOST_HOLDERS + 3):
        table.sent([7], f"m{number}")
    assert table.match([7]).holders[0] == f"m{MOST_HOLDERS + 2}"
    assert len(table.match([7]).holders) == MOST_HOLDERS
