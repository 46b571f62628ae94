"""Which of several servers of the same model takes a call. Pure decisions: no connection, no clock of their own."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar, Protocol

LEAST_SHARE = 0.5  # of a prompt that must be known somewhere: below it, reading it again costs less than a detour
MOST_SESSIONS = 1 << 18  # sessions whose servers are remembered
FEW = 4  # calls, up to which no server is crowded: they hardly slow each other down
AVERAGE = 1.0  # times what the others carry: no busier than they
BOUND = 1.25  # times that, up to which a server gets what has its prefix
CROWDED = 2.5  # times that, beyond which a session leaves its home
ALONE = 1  # server that has a prefix which others may still be spared; what two have, many sessions begin with
SHARED = 0.1  # of the calls are others', from which there seem to be other gateways
_KEY = b"agentspec placement"  # a hash of its own, the same in every process and on every machine

TABLE_BYTES = 64 << 20
ENTRY_BYTES = 224  # of one block's entry without its holders, as measured in CPython
HOLDER_BYTES = 8
MOST_HOLDERS = 16  # of one block that are remembered, the newest


@dataclass(frozen=True, slots=True)
class Member:
    """A server of a pool as it was last seen. `calls` is what every policy compares."""

    name: str
    in_flight: int = 0
    """Calls that the gateway has sent and that have not ended."""
    others: int = 0
    """Requests of anyone else in the server, by its own metrics: of other gateways, other workers, other clients."""
    waiting: int = 0
    """Requests queued in the server, by its own metrics. They count twice, since a queue is worse than a batch."""
    kv_use: float = 0.0
    """Share of the server's KV cache in use, 0 to 1."""

    @property
    def calls(self) -> int:
        """What it carries."""
        return self.in_flight + self.others + self.waiting


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of a call before it is sent. The session is scoped by tenant already."""

    session: str | None = None
    blocks: Sequence[int] = ()
    """Hashes of the prompt's blocks, each of all text up to its end, so that equal prefixes have equal hashes."""


class PlacementPolicy(Protocol):
    """Chooses a member for each call. One instance serves one pool, in one thread."""

    reads_prompts: ClassVar[bool]
    """Whether it looks at the blocks of calls, which callers then compute before they ask."""

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        """One of `members`, which are those that may take a call now: never empty."""
        ...

    def placed(self, call: Call, member: Member) -> None:
        """The call has been sent to `member`, which may not be the one chosen."""
        ...

    def removed(self, name: str) -> None:
        """The member left the pool or lost what it had cached."""
        ...


class _Stateless:
    reads_prompts: ClassVar[bool] = False

    def placed(self, call: Call, member: Member) -> None:
        del call, member

    def removed(self, name: str) -> None:
        del name


class RoundRobin(_Stateless):
    """One after the other: the one that was chosen least recently."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}  # when each was chosen last

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        del call
        chosen = min(members, key=lambda member: self._turns.get(member.name, 0))
        self._turns[chosen.name] = max(self._turns.values(), default=0) + 1
        return chosen

    def removed(self, name: str) -> None:
        self._turns.pop(name, None)


class LeastLoaded(_Stateless):
    """The member with the fewest calls; of equals the one with the freest KV cache."""

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        del call
        return freest(members)


def freest(members: Sequence[Member]) -> Member:
    """The member with the fewest calls; of equals the one with the freest KV cache."""
    return min(members, key=lambda member: (member.calls, member.kv_use))


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

    def __init__(self, max_bytes: int = TABLE_BYTES) -> None:
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


class Roster:
    """The members that may take a call, with what all of them carry."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._calls = sum(member.calls for member in members)

    def find(self, name: str | None) -> Member | None:
        """The member of this name, None if it may not take a call now."""
        return next((member for member in self.members if member.name == name), None)

    @property
    def others_share(self) -> float:
        """Share of the calls that others have sent, 0 to 1."""
        return sum(member.others for member in self.members) / max(1, self._calls)

    def has_room(self, member: Member, factor: float) -> bool:
        """Whether `member` carries at most `factor` times what the others do, one call more included, rounded up.

        For a factor of at least 1 the freest member always has room (Mirrokni, Thorup and Zadimoghaddam 2016).
        """
        most = factor * (self._calls + 1) / (len(self.members) + factor - 1)
        return member.calls + 1 <= math.ceil(most)


class WorkflowAffinity:
    """Sessions stay where their context is cached, as long as that server is not crowded. The default policy.

    A session's next call extends the context of the last one, which only one server has: its home. That is where this
    gateway sent it last, as long as it is not crowded: it may carry `CROWDED` times what the others do. A crowded
    server drives the session away, to one that has its prefix or to the freest.

    The home of a session that this gateway does not know follows from a hash, the same in every gateway. While all
    calls are this gateway's, a busy home is passed over: it may carry no more than the others do. Where others send
    calls too, they may have sent this session's, and only a crowded home is, or one in which calls wait. A new session
    with a prompt most of which one server has, and no other, goes there instead if that carries at most `BOUND` times
    what the others do, so that branches follow their trunk.

    Calls without a session go to the freest of the members with room that were sent the longest prefix of the prompt,
    else to the freest of all. So a popular prefix spreads to as many servers as its calls need (the rule of SGLang's
    cache-aware router, with its imbalance test replaced by a bound).
    """

    reads_prompts: ClassVar[bool] = True

    def __init__(self) -> None:
        self._table = PrefixTable()
        self._sessions: OrderedDict[str, str] = OrderedDict()  # the servers of sessions, the least recently sent first

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        roster = Roster(members)
        last = self._sessions.get(call.session) if call.session else None
        if (home := roster.find(last)) is not None and self._takes(home, roster):
            return home
        if call.session is None or last is not None:
            return self._holder(call, roster) or freest(members)
        return self._holder(call, roster, most=ALONE) or self._by_hash(call.session, roster)

    def placed(self, call: Call, member: Member) -> None:
        self._table.sent(call.blocks, member.name)
        if call.session:
            self._sessions[call.session] = member.name
            self._sessions.move_to_end(call.session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def removed(self, name: str) -> None:
        self._table.forget(name)

    def _holder(self, call: Call, roster: Roster, *, most: int = MOST_HOLDERS) -> Member | None:
        """The freest member with room that has most of the prompt; None if there is none, or more than `most` have."""
        match = self._table.match(call.blocks)
        if match.blocks < LEAST_SHARE * len(call.blocks) or not 0 < len(match.holders) <= most:
            return None
        holders = [member for member in roster.members if member.name in match.holders]
        chosen = freest(holders) if holders else None
        return chosen if chosen is not None and roster.has_room(chosen, BOUND) else None

    def _takes(self, home: Member, roster: Roster) -> bool:
        return home.calls < FEW or roster.has_room(home, CROWDED)

    def _by_hash(self, session: str, roster: Roster) -> Member:
        shared = roster.others_share > SHARED
        ranked = sorted(roster.members, key=lambda member: rank(session, member), reverse=True)
        return next((one for one in ranked if self._may_begin(one, roster, shared)), None) or freest(roster.members)

    def _may_begin(self, home: Member, roster: Roster, shared: bool) -> bool:
        return roster.has_room(home, AVERAGE) or (shared and not home.waiting and self._takes(home, roster))


def rank(session: str, member: Member) -> int:
    """How much a session is drawn to a member: each gets as many sessions, and one that comes or goes moves only
    its own (rendezvous hashing, Thaler and Ravishankar 1998).
    """
    digest = blake2b(f"{member.name}\0{session}".encode(errors="surrogatepass"), digest_size=8, key=_KEY).digest()
    return int.from_bytes(digest)


POLICIES: Mapping[str, Callable[[], PlacementPolicy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "workflow": WorkflowAffinity,
}
"""The policies by the names that settings use. Each pool gets an instance of its own."""
DEFAULT_POLICY = "workflow"
