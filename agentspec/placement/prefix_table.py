"""Which members were sent which prefixes: an estimate of what their prefix caches hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

ENTRY_BYTES = 224  # of one block's entry without its holders, as measured in CPython
HOLDER_BYTES = 8
MOST_HOLDERS = 16  # of one block that are remembered, the newest


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest known prefix of a prompt in blocks, and the members that it was sent to, the newest first."""

    blocks: int = 0
    holders: tuple[str, ...] = ()


NO_MATCH = PrefixMatch()


class PrefixTable:
    """Blocks of prompts with the members that they were sent to, in at most `max_bytes`.

    A block's hash covers all text up to its end, so that the deepest known block of a prompt says all. Blocks are
    forgotten from the least recently sent prompt on, its last block first, as vLLM's prefix cache evicts: what is known
    of a prompt is thus always a prefix of it, which `match` finds by bisection.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # the least recently sent block first

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def bytes(self) -> int:
        return self._bytes

    def match(self, blocks: Sequence[int]) -> PrefixMatch:
        """The longest prefix that some member was sent. O(log blocks)."""
        known = self._holders
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if blocks[middle] in known else (low, middle)
        return PrefixMatch(low, known[blocks[low - 1]]) if low else NO_MATCH

    def sent(self, blocks: Sequence[int], name: str) -> None:
        """A prompt of these blocks has gone to the member `name`."""
        known, alone, before = self._holders, (name,), len(self._holders)
        find, renew = known.get, known.move_to_end
        for block in reversed(blocks):  # the first block becomes the newest
            holders = find(block)
            if holders is None:
                known[block] = alone
            else:
                renew(block)
                if name not in holders:
                    self._replace(block, (name, *holders[: MOST_HOLDERS - 1]))
        self._bytes += (len(known) - before) * (ENTRY_BYTES + HOLDER_BYTES)
        while self._bytes > self._max_bytes:
            _, holders = known.popitem(last=False)
            self._bytes -= ENTRY_BYTES + HOLDER_BYTES * len(holders)

    def forget(self, name: str) -> None:
        """The member has lost its cache. Costs a pass over the table: servers do not leave often."""
        for block, holders in list(self._holders.items()):
            if name in holders:
                self._replace(block, tuple(one for one in holders if one != name))

    def _replace(self, block: int, holders: tuple[str, ...]) -> None:
        self._bytes += HOLDER_BYTES * (len(holders) - len(self._holders[block]))
        if holders:
            self._holders[block] = holders
        else:
            del self._holders[block]
            self._bytes -= ENTRY_BYTES
