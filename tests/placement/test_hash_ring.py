"""Keys stay where they are unless their member goes, in every process."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.placement.hash_ring import HashRing

NAMES = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=2, max_size=8, unique=True)
KEYS = [f"session {number}" for number in range(60)]


def _home(ring, key):
    return next(ring.walk(key))


@settings(max_examples=25)
@given(NAMES)
def test_a_member_that_goes_or_comes_moves_only_its_own_keys(names):
    ring = HashRing(dict.fromkeys(names, 1.0))
    before = {key: _home(ring, key) for key in KEYS}
    ring.remove(names[0])
    without = {key: _home(ring, key) for key in KEYS}
    assert all(without[key] == home for key, home in before.items() if home != names[0])
    ring.add({names[0]: 1.0})
    assert {key: _home(ring, key) for key in KEYS} == before


def test_every_member_is_asked_once_in_an_order_of_the_key_alone():
    names = [f"m{number}" for number in range(9)]
    one, other = HashRing(dict.fromkeys(names, 1.0)), HashRing(dict.fromkeys(reversed(names), 1.0))
    for key in [*KEYS[:10], "half a character: \ud800"]:
        assert sorted(one.walk(key)) == names
        assert list(one.walk(key)) == list(other.walk(key))


def test_shares_follow_the_weights():
    ring = HashRing({"a": 1.0, "b": 3.0})
    ring.add({"a": 3.0, "b": 1.0})
    homes = Counter(_home(ring, str(number)) for number in range(2000))
    assert 0.6 < homes["a"] / 2000 < 0.9


def test_another_process_finds_the_same_homes():
    program = (
        "from agentspec.placement.hash_ring import HashRing\n"
        "ring = HashRing({'a': 1.0, 'b': 1.0, 'c': 2.0})\n"
        "print(*(next(ring.walk(str(key))) for key in range(40)))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    ring = HashRing({"a": 1.0, "b": 1.0, "c": 2.0})
    assert said.split() == [_home(ring, str(key)) for key in range(40)]
