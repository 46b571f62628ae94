"""Sessions stay where their context is cached, as long as that server is not crowded. The default policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentspec.placement.bounded import RecentlyUsed
from agentspec.placement.hash_ring import HashRing
from agentspec.placement.policy import Call, Member
from agentspec.placement.prefix import PrefixAffinity
from agentspec.placement.roster import Roster

MOST_NAMES = 1 << 18  # sessions whose servers are remembered
MOST_WORKFLOWS = 1 << 14
MOST_ABSENT = 4  # times the members that are there: the ring forgets servers that left without a word
FEW = 4  # calls, up to which no server is crowded: they hardly slow each other down
AVERAGE = 1.0  # times what the others carry: no busier than they
ALONE = 1  # server that has a prefix which others may still be spared; what two have, many sessions begin with
COUNTED = 512  # calls of a workflow that it is judged by, and at least half as many
SHARED = 0.1  # of the calls are others', from which there seem to be other gateways
RECENT = 32  # new sessions over which that is looked at
LONE = 0.9  # share of them that begin a session, from which its sessions are taken to make one call


@dataclass(slots=True)
class _Calls:
    """Calls of a workflow's sessions, and how many of them began one. The older ones count less and less."""

    count: float = 0.0
    begun: float = 0.0

    def add(self, *, begins: bool) -> None:
        if self.count >= COUNTED:
            self.count, self.begun = self.count / 2, self.begun / 2
        self.count += 1
        self.begun += begins

    @property
    def are_lone(self) -> bool:
        return self.count >= COUNTED / 2 and self.begun >= LONE * self.count


class WorkflowAffinity:
    """Session affinity by consistent hashing with bounded load, then the longest prefix, then freeness.

    A session's next call extends the context of the last one, which only one server has: its home. That is where this
    gateway sent it last, as long as it is not crowded: it may carry `crowded` times what the others do. A crowded
    server drives the session away, to one that has its prefix or to the freest.

    The home of a session that this gateway does not know is its place on a consistent-hash ring, which is the same in
    every gateway. While all calls are this gateway's, a busy home is passed over: it may carry no more than
    the others do. Where others send calls too, they may have sent this session's, and only a crowded home is, or one in
    which calls wait. A new session with a prompt most of which one server has, and no other, goes there instead
    if that carries at most `bound` times what the others do, so that branches follow their trunk.

    Calls without a session, and of workflows whose sessions make a single call, have no home: they go by their prefix,
    or to the freest server.
    """

    reads_prompts: ClassVar[bool] = True

    def __init__(self, *, bound: float = 1.25, crowded: float = 2.5, table_bytes: int = 64 << 20) -> None:
        self._crowded = crowded
        self._prefix = PrefixAffinity(bound=bound, table_bytes=table_bytes)
        self._ring = HashRing()
        self._on_ring: Roster | None = None
        self._sessions: RecentlyUsed[str, str] = RecentlyUsed(MOST_NAMES)
        self._workflows: RecentlyUsed[str, _Calls] = RecentlyUsed(MOST_WORKFLOWS)
        self._others = 0.0  # share of the calls, of late

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        roster = Roster.of(members)
        last = self._sessions.get(call.session) if call.session else None
        if (home := roster.find(last)) is not None and self._takes(home, roster):
            return home
        if call.session is None or last is not None or self._is_lone(call):
            return self._prefix.holder(call, roster) or roster.freest()
        return self._prefix.holder(call, roster, most=ALONE) or self._by_hash(call.session, roster)

    def placed(self, call: Call, member: Member) -> None:
        self._prefix.placed(call, member)
        if call.session:
            self._sessions.put(call.session, member.name)
            self._count(call)

    def removed(self, name: str) -> None:
        self._prefix.removed(name)
        self._ring.remove(name)
        self._on_ring = None

    def _takes(self, home: Member, roster: Roster) -> bool:
        return home.calls < FEW * home.weight or roster.has_room(home, self._crowded)

    def _count(self, call: Call) -> None:
        calls = self._workflows.get(call.workflow or "")
        if calls is None:
            self._workflows.put(call.workflow or "", calls := _Calls())
        calls.add(begins=call.begins)

    def _is_lone(self, call: Call) -> bool:
        calls = self._workflows.get(call.workflow or "") if call.begins else None
        return calls is not None and calls.are_lone

    def _by_hash(self, session: str, roster: Roster) -> Member:
        if roster is not self._on_ring:  # else its members are known
            if len(self._ring) > MOST_ABSENT * len(roster):
                self._ring = HashRing()
            self._ring.add({member.name: member.weight for member in roster})
            self._on_ring = roster
        shared = self._is_shared(roster)
        for name in self._ring.walk(session):
            member = roster.find(name)
            if member is not None and self._may_begin(member, roster, shared):
                return member
        return roster.freest()

    def _may_begin(self, home: Member, roster: Roster, shared: bool) -> bool:
        return roster.has_room(home, AVERAGE) or (shared and not home.waiting and self._takes(home, roster))

    def _is_shared(self, roster: Roster) -> bool:
        """Whether others have lately sent a good part of the calls."""
        self._others += (roster.others_share - self._others) / RECENT
        return self._others > SHARED
