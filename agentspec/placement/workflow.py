"""Sessions stay where their context is cached, as long as that server is not crowded. The default policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from agentspec.placement.bounded import RecentlyUsed
from agentspec.placement.hash_ring import HashRing
from agentspec.placement.policy import Call, Member
from agentspec.placement.prefix import PrefixAffinity
from agentspec.placement.roster import Roster

MOST_NAMES = 1 << 18  # sessions, and as many workflows, whose servers are remembered
MOST_ABSENT = 4  # times the members that are there: the ring forgets servers that left without a word
AVERAGE = 1.0  # times a server's share of the calls: no busier than all together


class WorkflowAffinity:
    """Session affinity with bounded load, then the longest prefix, then the ring, then freeness.

    A session's next call extends the context of the last one, which only one server has: it returns there while the
    server carries at most `stay` times its share of the calls, and moves to a holder of its prefix or to the freest
    server beyond. Of a session that is not known here, be it new or served by another gateway so far, the first call
    goes to a server that has most of its prompt and at most `bound` times its share; or to its workflow's latest
    server; or to its home on a consistent-hash ring, which is the same in every gateway. Those two only take it while
    they are no busier than the average, since there may be nothing to gain. Calls without a session and without a known
    prefix go to the freest server.
    """

    reads_prompts: ClassVar[bool] = True

    def __init__(self, *, bound: float = 1.25, stay: float = 2.0, table_bytes: int = 64 << 20) -> None:
        self._stay = stay
        self._prefix = PrefixAffinity(bound=bound, table_bytes=table_bytes)
        self._ring = HashRing()
        self._on_ring: Roster | None = None
        self._sessions: RecentlyUsed[str, str] = RecentlyUsed(MOST_NAMES)
        self._workflows: RecentlyUsed[str, str] = RecentlyUsed(MOST_NAMES)

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        roster = Roster.of(members)
        last = self._sessions.get(call.session) if call.session else None
        if (home := roster.find(last)) is not None and roster.has_room(home, self._stay):
            return home
        return self._prefix.holder(call, roster) or self._sibling(call, roster) or self._first(call, roster, last)

    def placed(self, call: Call, member: Member) -> None:
        self._prefix.placed(call, member)
        if call.session:
            self._sessions.put(call.session, member.name)
        if call.workflow:
            self._workflows.put(call.workflow, member.name)

    def removed(self, name: str) -> None:
        self._prefix.removed(name)
        self._ring.remove(name)
        self._on_ring = None

    def _sibling(self, call: Call, roster: Roster) -> Member | None:
        """Where the workflow's latest call went, for a call whose prompt cannot be compared."""
        if call.blocks or not call.workflow:
            return None
        member = roster.find(self._workflows.get(call.workflow))
        return member if member is not None and roster.has_room(member, AVERAGE) else None

    def _first(self, call: Call, roster: Roster, last: str | None) -> Member:
        """The server of a call that finds its context nowhere: a session that is driven away goes to the freest."""
        if call.session is None or last is not None:
            return roster.freest()
        return self._by_hash(call.session, roster)

    def _by_hash(self, session: str, roster: Roster) -> Member:
        if roster is not self._on_ring:  # else its members are known
            if len(self._ring) > MOST_ABSENT * len(roster):
                self._ring = HashRing()
            self._ring.add({member.name: member.weight for member in roster})
            self._on_ring = roster
        for name in self._ring.walk(session):
            member = roster.find(name)
            if member is not None and roster.has_room(member, AVERAGE):
                return member
        return roster.freest()
