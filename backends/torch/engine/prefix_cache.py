"""Stores the KV slots of earlier requests, so that the next prompt of a conversation need not be computed again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.torch.model.kv_cache import Rows, RowsPart, SequenceCache
from agentspec.cache.deletion import Reach

SHORTEST = 8  # a shorter common prefix is faster to compute again than to copy
Tokens = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A stretch of tokens with their slots, in a tree: every path from the root is the beginning of a text.

    `used` is the time of its last use. `session` is that of the request that brought the tokens first, at the time
    `made`; `guessed` ones were read ahead of any request. A tenant's root has neither tokens nor slots.
    """

    tokens: Tokens
    rows: Rows
    parent: PrefixNode | None
    used: int = 0
    children: list[PrefixNode] = field(default_factory=list)
    session: str | None = None
    guessed: bool = False
    made: float = field(default_factory=time)


class PrefixCache:
    """Keeps sequences by tenant and finds them by longest common prefix; what several have in common, such as a system
    prompt, is stored once. The least recently used ends of texts are dropped first.

    `find` returns copies of the slots, so that branches of one conversation can run at once. Holds no more than the
    last `shrink`, `find` or `keep` allowed. Any thread may call `forget`; all else belongs to one thread. `find` and
    `shrink` carry out what was to be forgotten before they begin. `keep` does not: a deletion that comes
    while its caller decides to keep something reaches that too.
    """

    def __init__(self) -> None:
        self._roots: dict[str, PrefixNode] = {}
        self._clock = count(1)
        self._deletions: deque[Reach] = deque()
        self.nbytes = 0

    def forget(self, reach: Reach) -> None:
        """Delete what `reach` covers: it is found no more, and the next `shrink` frees its memory."""
        self._deletions.append(reach)

    @property
    def forgets(self) -> bool:
        """Whether a deletion is still to be carried out, as `shrink` does."""
        return bool(self._deletions)

    def claim(self, tenant: str, tokens: Sequence[int]) -> bool:
        """Whether slots of a prefix of `tokens` were read ahead. From now on they count as those of a request."""
        guessed = [node for node, _ in self._match(tenant, np.asarray(tokens, dtype=np.int64)) if node.guessed]
        for node in guessed:
            node.guessed = False
        return bool(guessed)

    def find(
        self, tenant: str, tokens: Sequence[int], capacity: int, left_bytes: int | None = None
    ) -> SequenceCache | None:
        """A copy of the slots of the tenant's longest cached prefix of `tokens`, with room for `capacity` slots; None
        if that prefix has fewer than `SHORTEST` tokens.

        At most `left_bytes` are still held afterwards. Where that is too little for the prefix itself, its slots are
        moved instead of copied, layer by layer.
        """
        self._carry_out()
        path = self._match(tenant, np.asarray(tokens, dtype=np.int64))
        if sum(length for _, length in path) < SHORTEST:
            self._shrink(left_bytes)
            return None
        self._touch(node for node, _ in path)
        dropped = self._shrink(left_bytes) & {node for node, _ in path}
        return SequenceCache.joined([RowsPart(node.rows, length, node in dropped) for node, length in path], capacity)

    def keep(
        self,
        tenant: str,
        tokens: Sequence[int],
        cache: SequenceCache,
        left_bytes: int | None = None,
        *,
        copy: bool = True,
        session: str | None = None,
        guessed: bool = False,
    ) -> None:
        """Keep the slots of `tokens`, the first ones of `cache`, as far as they are not cached already, if they fit.

        Without `copy` they are taken out of `cache`, which cannot be used afterwards. At most `left_bytes` are held
        afterwards.
        """
        assert len(tokens) <= cache.length, f"{cache.length} slots for {len(tokens)} tokens"
        own = np.asarray(tokens, dtype=np.int64)
        if len(own) < SHORTEST:
            return
        path = self._match(tenant, own)
        shared = sum(length for _, length in path)
        self._touch(node for node, _ in path)
        needed = (len(own) - shared) * cache.slot_bytes
        if shared == len(own) or (left_bytes is not None and needed > left_bytes):
            return
        parent = self._branch(tenant, path)
        if left_bytes is not None:
            self._shrink(left_bytes - needed, set(_lineage(parent)))
            if self.nbytes + needed > left_bytes:
                return
        rows = cache.rows(shared, len(own), release=not copy)
        node = PrefixNode(own[shared:], rows, parent, next(self._clock), session=session, guessed=guessed)
        parent.children.append(node)
        self.nbytes += node.rows.nbytes
        self._roots[tenant] = [*_lineage(node)][-1]

    def shrink(self, left_bytes: int | None) -> None:
        """Drop the least recently used ends of texts until at most `left_bytes` are held."""
        self._carry_out()
        self._shrink(left_bytes)

    def _shrink(self, left_bytes: int | None, spared: Collection[PrefixNode] = ()) -> set[PrefixNode]:
        """As `shrink`, but drop none of `spared`. Returns what was dropped."""
        dropped = set[PrefixNode]()
        while left_bytes is not None and self.nbytes > left_bytes:
            end = min((node for node in self._ends() if node not in spared), key=lambda node: node.used, default=None)
            if end is None:
                break
            self._drop(end)
            dropped.add(end)
        return dropped

    def clear(self) -> None:
        self._roots.clear()
        self.nbytes = 0

    def _carry_out(self) -> None:
        """Delete what was to be forgotten, with the texts that go on behind it."""
        while self._deletions:
            reach = self._deletions.popleft()
            for tenant in [tenant for tenant in self._roots if reach.concerns(tenant)]:
                waiting = [self._roots[tenant]]
                while waiting:
                    node = waiting.pop()
                    node.children = [one for one in node.children if not _reached(one, tenant, reach)]
                    waiting += node.children
            self._roots = {tenant: root for tenant, root in self._roots.items() if root.children}
            self.nbytes = sum(node.rows.nbytes for node in self._nodes())

    def _match(self, tenant: str, wanted: Tokens) -> list[tuple[PrefixNode, int]]:
        """The nodes whose tokens `wanted` begins with, and how many tokens of each."""
        path: list[tuple[PrefixNode, int]] = []
        node, at = self._roots.get(tenant), 0
        while node is not None and at < len(wanted):
            node = next((child for child in node.children if child.tokens[0] == wanted[at]), None)
            if node is not None:
                length = common_prefix(node.tokens, wanted[at:])
                path.append((node, length))
                at += length
                if length < len(node.tokens):
                    break
        return path

    def _branch(self, tenant: str, path: list[tuple[PrefixNode, int]]) -> PrefixNode:
        """The node below which a text goes on that shares `path` with others; divides the last node if need be."""
        if not path:
            return self._roots.setdefault(tenant, PrefixNode(np.empty(0, np.int64), Rows([], []), None))
        node, length = path[-1]
        return node if length == len(node.tokens) else self._divided(node, length)

    def _divided(self, node: PrefixNode, at: int) -> PrefixNode:
        """Divide a node in two, of which the first is returned."""
        assert node.parent is not None
        first, rest = node.rows.split(at)
        head = PrefixNode(
            node.tokens[:at].copy(), first, node.parent, node.used, [node], node.session, node.guessed, node.made
        )
        node.parent.children[node.parent.children.index(node)] = head
        node.tokens, node.rows, node.parent = node.tokens[at:].copy(), rest, head
        return head

    def _touch(self, nodes: Iterator[PrefixNode]) -> None:
        now = next(self._clock)
        for node in nodes:
            node.used = now

    def _drop(self, end: PrefixNode) -> None:
        self.nbytes -= end.rows.nbytes
        assert end.parent is not None
        end.parent.children.remove(end)
        if end.parent.parent is None and not end.parent.children:
            self._roots = {tenant: root for tenant, root in self._roots.items() if root.children}

    def _ends(self) -> Iterator[PrefixNode]:
        """All nodes that no text goes on behind."""
        return (node for node in self._nodes() if not node.children and node.parent is not None)

    def _nodes(self) -> Iterator[PrefixNode]:
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children
            yield node


def _reached(node: PrefixNode, tenant: str, reach: Reach) -> bool:
    return node.guessed or reach.covers(tenant, node.session, node.made)


def _lineage(node: PrefixNode | None) -> Iterator[PrefixNode]:
    """The node and all above it."""
    while node is not None:
        yield node
        node = node.parent


def common_prefix(left: NDArray[Any], right: NDArray[Any]) -> int:
    """The number of leading tokens that two sequences have in common."""
    size = min(len(left), len(right))
    differs = np.flatnonzero(left[:size] != right[:size])
    return int(differs[0]) if len(differs) else size
