"""The policies that know what servers have cached: by prefix, and by session."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import ClassVar

from agentspec.placement.bounded import RecentlyUsed
from agentspec.placement.policy import Call, Member
from agentspec.placement.prefix_table import MOST_HOLDERS, PrefixTable

LEAST_SHARE = 0.5  # of a prompt that must be known somewhere: below it, reading it anew costs less than a detour
MOST_NAMES = 1 << 18  # sessions whose servers are remembered
FEW = 4  # calls, up to which no server is crowded: they hardly slow each other down
AVERAGE = 1.0  # times what the others carry: no busier than they
ALONE = 1  # server that has a prefix which others may still be spared; what two have, many sessions begin with
SHARED = 0.1  # of the calls are others', from which there seem to be other gateways
_KEY = b"agentspec placement"  # a hash of its own, the same in every process and on every machine


class Roster:
    """The members that may take a call, with what all of them carry."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self._calls = sum(member.calls for member in members)
        self._weight = sum(member.weight for member in members)

    def find(self, name: str | None) -> Member | None:
        """The member of this name, None if it may not take a call now."""
        return next((member for member in self.members if member.name == name), None)

    def freest(self) -> Member:
        """The member with the fewest calls for its weight; of equals the one with the freest KV cache."""
        return freest(self.members)

    @property
    def others_share(self) -> float:
        """Share of the calls that others have sent, 0 to 1."""
        return sum(member.others for member in self.members) / max(1, self._calls)

    def has_room(self, member: Member, factor: float) -> bool:
        """Whether `member` carries at most `factor` times what the others do for their weight, one call more included,
        rounded up.

        For a factor of at least 1 the freest member always has room (Mirrokni, Thorup and Zadimoghaddam 2016).
        """
        most = factor * member.weight * (self._calls + 1) / (self._weight + (factor - 1) * member.weight)
        return member.calls + 1 <= math.ceil(most)


class PrefixAffinity:
    """The freest of the members that were sent the longest prefix of the prompt; else the freest of all.

    A member has room while it carries at most `bound` times what the others do. Of two servers with the same
    prefix the freer one is taken, and a crowded one is left alone, so that a popular prefix spreads to as many servers
    as its calls need (the rule of SGLang's cache-aware router, with its imbalance test replaced by a bound).
    """

    reads_prompts: ClassVar[bool] = True

    def __init__(self, *, bound: float = 1.6, table_bytes: int = 64 << 20) -> None:
        self.bound = bound
        self.table = PrefixTable(table_bytes)

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        roster = Roster(members)
        return self.holder(call, roster) or roster.freest()

    def holder(self, call: Call, roster: Roster, *, most: int = MOST_HOLDERS) -> Member | None:
        """The freest member with room that has most of the prompt; None if there is none, or more than `most` have."""
        match = self.table.match(call.blocks)
        if match.blocks < LEAST_SHARE * len(call.blocks) or not 0 < len(match.holders) <= most:
            return None
        holders = [member for member in roster.members if member.name in match.holders]
        chosen = freest(holders) if holders else None
        return chosen if chosen is not None and roster.has_room(chosen, self.bound) else None

    def placed(self, call: Call, member: Member) -> None:
        self.table.sent(call.blocks, member.name)

    def removed(self, name: str) -> None:
        self.table.forget(name)


class WorkflowAffinity:
    """Sessions stay where their context is cached, as long as that server is not crowded. The default policy.

    A session's next call extends the context of the last one, which only one server has: its home. That is where this
    gateway sent it last, as long as it is not crowded: it may carry `crowded` times what the others do. A crowded
    server drives the session away, to one that has its prefix or to the freest.

    The home of a session that this gateway does not know follows from a hash, the same in every gateway. While all
    calls are this gateway's, a busy home is passed over: it may carry no more than the others do. Where others send
    calls too, they may have sent this session's, and only a crowded home is, or one in which calls wait. A new session
    with a prompt most of which one server has, and no other, goes there instead if that carries at most `bound` times
    what the others do, so that branches follow their trunk.

    Calls without a session go by their prefix, or to the freest server.
    """

    reads_prompts: ClassVar[bool] = True

    def __init__(self, *, bound: float = 1.25, crowded: float = 2.5, table_bytes: int = 64 << 20) -> None:
        self._crowded = crowded
        self._prefix = PrefixAffinity(bound=bound, table_bytes=table_bytes)
        self._sessions: RecentlyUsed[str, str] = RecentlyUsed(MOST_NAMES)

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        roster = Roster(members)
        last = self._sessions.get(call.session) if call.session else None
        if (home := roster.find(last)) is not None and self._takes(home, roster):
            return home
        if call.session is None or last is not None:
            return self._prefix.holder(call, roster) or roster.freest()
        return self._prefix.holder(call, roster, most=ALONE) or self._by_hash(call.session, roster)

    def placed(self, call: Call, member: Member) -> None:
        self._prefix.placed(call, member)
        if call.session:
            self._sessions.put(call.session, member.name)

    def removed(self, name: str) -> None:
        self._prefix.removed(name)

    def _takes(self, home: Member, roster: Roster) -> bool:
        return home.calls < FEW * home.weight or roster.has_room(home, self._crowded)

    def _by_hash(self, session: str, roster: Roster) -> Member:
        shared = roster.others_share > SHARED
        ranked = sorted(roster.members, key=lambda member: rank(session, member), reverse=True)
        return next((one for one in ranked if self._may_begin(one, roster, shared)), None) or roster.freest()

    def _may_begin(self, home: Member, roster: Roster, shared: bool) -> bool:
        return roster.has_room(home, AVERAGE) or (shared and not home.waiting and self._takes(home, roster))


def freest(members: Sequence[Member]) -> Member:
    """The member with the fewest calls for its weight; of equals the one with the freest KV cache."""
    return min(members, key=lambda member: (member.load, member.kv_use))


def rank(session: str, member: Member) -> float:
    """How much a session is drawn to a member: each gets sessions by its weight, and one that comes or goes moves only
    its own (rendezvous hashing, Thaler and Ravishankar 1998).
    """
    digest = blake2b(f"{member.name}\0{session}".encode(errors="surrogatepass"), digest_size=8, key=_KEY).digest()
    return -member.weight / math.log((int.from_bytes(digest) + 1) / ((1 << 64) + 1))
