"""Which of several servers of the same model takes a call. Pure decisions: no connection, no clock of their own."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, ClassVar

LEAST_SHARE = 0.5  # of a prompt that must be known somewhere: below it, reading it again costs less than a detour
MOST_SESSIONS = 1 << 18  # sessions whose servers are remembered
FEW = 4  # calls, up to which no server is crowded: they hardly slow each other down
AVERAGE = 1.0  # times what the others carry: no busier than they
BOUND = 1.25  # times that, up to which a server gets what has its prefix
CROWDED = 2.5  # times that, beyond which a session leaves its home
ALONE = 1  # server that has a prefix which others may still be spared; what two have, many sessions begin with
SHARED = 0.1  # of the calls are others', from which there seem to be other gateways
_KEY = b"agentspec placement"  # a hash of its own, the same in every process and on every machine

TABLE_BLOCKS = 1 << 18  # of prompts that are remembered, of about 230 to 360 bytes each
MOST_HOLDERS = 16  # of one block that are remembered, the newest

BLOCK_BYTES = 1024  # about 256 tokens, sixteen of vLLM's blocks
MAX_BLOCKS = 512
MAX_BYTES = MAX_BLOCKS * BLOCK_BYTES
_TEXT_MESSAGE = {"role", "content"}
ITEMS = 256  # of a list of token ids that are encoded at once
MOST_PIECES = 4096  # of a prompt that are read: more than it may have messages


@dataclass(frozen=True, slots=True)
class Member:
    """A server of a pool as it was last seen. `calls` is what every policy compares: the calls under way.

    `waiting`, by the server's metrics, counts twice, since a queue is worse than a batch. `kv_use` is the share of its
    KV cache in use.
    """

    name: str
    in_flight: int = 0  # calls that this gateway has sent
    others: int = 0  # requests of other gateways and clients
    waiting: int = 0
    kv_use: float = 0.0

    @property
    def calls(self) -> int:
        return self.in_flight + self.others + self.waiting


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of a call before it is sent: the session, scoped by tenant, and hashes of the prompt's blocks, each
    of all text up to its end, so that equal prefixes have equal hashes.
    """

    session: str | None = None
    blocks: Sequence[int] = ()


class PlacementPolicy(ABC):
    """Chooses a member for each call. One instance serves one pool, in one thread."""

    reads_prompts: ClassVar[bool] = False
    """Whether it looks at the blocks of calls, which callers then compute before they ask."""

    @abstractmethod
    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        """One of `members`, which are those that may take a call now: never empty."""

    def placed(self, call: Call, member: Member) -> None:  # noqa: B027  (an answer is not required)
        """The call has been sent to `member`, which may not be the one chosen."""

    def removed(self, name: str) -> None:  # noqa: B027
        """The member left the pool or lost what it had cached."""


class RoundRobin(PlacementPolicy):
    """One after the other: the one that was chosen least recently."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}  # when each was chosen last

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        chosen = min(members, key=lambda member: self._turns.get(member.name, 0))
        self._turns[chosen.name] = max(self._turns.values(), default=0) + 1
        return chosen

    def removed(self, name: str) -> None:
        self._turns.pop(name, None)


class LeastLoaded(PlacementPolicy):
    """The freest member."""

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        return freest(members)


def freest(members: Sequence[Member]) -> Member:
    """The member with the fewest calls; of equals the one with the freest KV cache."""
    return min(members, key=lambda member: (member.calls, member.kv_use))


class PrefixTable:
    """At most `most` blocks of prompts, with the members that they were sent to.

    A block's hash covers all text up to its end, so that the deepest known block of a prompt says all. Blocks are
    forgotten from the least recently sent prompt on, its last block first, as vLLM's prefix cache evicts: so the known
    blocks of a prompt are always a prefix of it, which `match` finds by bisection.
    """

    def __init__(self, most: int = TABLE_BLOCKS) -> None:
        self._most = most
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # the least recently sent block first

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, blocks: Sequence[int]) -> tuple[int, tuple[str, ...]]:
        """The blocks in the longest prefix that some member was sent, and these members, the newest first."""
        known = self._holders
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if blocks[middle] in known else (low, middle)
        return (low, known[blocks[low - 1]]) if low else (0, ())

    def sent(self, blocks: Sequence[int], name: str) -> None:
        """A prompt of these blocks was sent to the member `name`."""
        known, alone = self._holders, (name,)
        find, renew = known.get, known.move_to_end
        for block in reversed(blocks):  # the first block becomes the newest
            holders = find(block)
            if holders is None:
                known[block] = alone
            else:
                renew(block)
                if name not in holders:
                    known[block] = (name, *holders[: MOST_HOLDERS - 1])
        while len(known) > self._most:
            known.popitem(last=False)

    def forget(self, name: str) -> None:
        """The member has lost its cache. Costs a pass over the table: servers do not leave often."""
        for block, holders in list(self._holders.items()):
            if holders == (name,):
                del self._holders[block]
            elif name in holders:
                self._holders[block] = tuple(one for one in holders if one != name)


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


class WorkflowAffinity(PlacementPolicy):
    """Sessions stay where their context is cached, as long as that server is not crowded. The default policy.

    A session's home is the server that this gateway sent it to last. It is left when it carries more than `CROWDED`
    times what the others do, for a server that has the prompt's prefix or for the freest.

    The home of a session that this gateway does not know follows from a hash, the same in every gateway. It may carry
    no more than the others do, unless other gateways send calls too, which may have sent this session's: then it only
    may not be crowded, nor have waiting calls. If one server alone has most of a new session's prompt, the session goes
    there while that server carries at most `BOUND` times what the others do, so that branches follow their trunk.

    Calls without a session go to the freest of the members with room that have the longest prefix of the prompt, else
    to the freest of all: a popular prefix spreads to as many servers as its calls need (as in SGLang's router).
    """

    reads_prompts = True

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
        known, names = self._table.match(call.blocks)
        if known < LEAST_SHARE * len(call.blocks) or not 0 < len(names) <= most:
            return None
        holders = [member for member in roster.members if member.name in names]
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


# Prompts as blocks.


def block_hashes(scope: str, pieces: Iterable[bytes]) -> Iterator[int]:
    """The hash of each whole block of the text in `pieces`, at most `MAX_BLOCKS`; later pieces are not read."""
    last, rest, count = hash(scope), b"", 0
    for piece in pieces:
        text = rest + piece if rest else piece
        for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
            last = hash((last, text[start : start + BLOCK_BYTES]))
            yield last
            count += 1
            if count == MAX_BLOCKS:
                return
        rest = text[len(text) - len(text) % BLOCK_BYTES :]


def prompt_blocks(tenant: str, fields: Mapping[str, Any]) -> tuple[int, ...]:
    """The hashes of the blocks of the prompt in a body with these `fields`, each of all text up to its end; an
    unfinished block has none. Tenants' prompts share nothing, and hashes hold for this process.
    """
    return tuple(block_hashes(tenant, prompt_pieces(fields)))


def scoped_call(tenant: str, session: str | None, blocks: Sequence[int] = ()) -> Call:
    """What policies know of a call of a tenant's `session`."""
    return Call(session and f"{tenant}\n{session}", blocks)


def prompt_pieces(fields: Mapping[str, Any]) -> Iterable[bytes]:
    """The prompt in a body with these `fields`, piece by piece, as text in which equal beginnings are equal.

    What lies beyond `MOST_PIECES` is left out, so that no body takes long to read.
    """
    return islice(_pieces(fields), MOST_PIECES)


def _pieces(fields: Mapping[str, Any]) -> Iterator[bytes]:
    yield _encoded(fields.get("tools"))
    for name in ("system", "instructions", "prompt", "input", "messages"):
        value = fields.get(name)
        if isinstance(value, list):
            yield from chain.from_iterable(
                _items(value[start : start + ITEMS]) for start in range(0, len(value), ITEMS)
            )
        elif value is not None:
            yield _encoded(value)


def _items(items: list[Any]) -> Iterator[bytes]:
    """Some items of a list: messages and prompts each by itself, token ids all at once, since they are many and small.

    A longer list begins as a shorter one does: each item ends with its comma, and no bracket ends the list.
    """
    if isinstance(items[0], (dict, list)):
        yield from map(_encoded, items)
    else:
        yield _encoded(items)[1:-1] + b","


def _encoded(value: Any) -> bytes:
    """As JSON, which is no need for a message that is only text; of a long text, its beginning."""
    if isinstance(value, str):
        value = value[:MAX_BYTES]
    elif isinstance(value, dict) and value.keys() == _TEXT_MESSAGE and isinstance(text := value["content"], str):
        return f"{value['role']}\0{text[:MAX_BYTES]}\0".encode("utf-8", "replace")
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
