"""Stretches are cached and evicted exactly as their single blocks would be."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from agentspec.benchmarks.placement.engine import SimulatedPrefixCache

SHARED = {"none": (), "short": ((1, 3),), "long": ((1, 3), (2, 4))}
CALLS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 6), st.booleans()), max_size=50
)  # the session, how much longer it gets, whether its answer takes until the next call


class BlockCache:
    """The same with a block for each token: least recently used first, the end of a prompt before its beginning."""

    def __init__(self, capacity):
        self.capacity, self.idle, self.users = capacity, OrderedDict(), {}

    def begin(self, path, known):
        hit = next(
            (n for n, block in enumerate(path[:known]) if block not in self.idle and block not in self.users), known
        )
        if len(set(self.users) | set(path)) > self.capacity:
            return None
        for block in path:
            self.idle.pop(block, None)
            self.users[block] = self.users.get(block, 0) + 1
        while len(self.users) + len(self.idle) > self.capacity:
            self.idle.popitem(last=False)
        return hit

    def end(self, path):
        for block in reversed(path):
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]
                self.idle[block] = None


@given(CALLS, st.integers(8, 40))
def test_hits_equal_those_of_single_blocks(calls, capacity):
    cache, blocks = SimulatedPrefixCache(capacity), BlockCache(capacity)
    lengths, open_calls = {}, {}
    for session, growth, stays in calls:
        if session in open_calls:
            shared, path = open_calls.pop(session)
            cache.end(shared, -1 - session)
            blocks.end(path)
        shared = list(SHARED.values())[session % 3]
        before = lengths.get(session, 0)
        tokens = before + growth
        path = [(key, n) for key, size in shared for n in range(size)] + [(-1 - session, n) for n in range(tokens)]
        common = len(path) - tokens
        hit = cache.begin(shared, -1 - session, before, tokens)
        assert hit == blocks.begin(path, common + before)
        assert cache.pinned_tokens == len(blocks.users)
        if hit is None:
            continue
        lengths[session] = tokens
        open_calls[session] = shared, path
        if not stays:
            cache.end(*(shared, -1 - session))
            blocks.end(open_calls.pop(session)[1])
