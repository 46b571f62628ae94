"""Calls go where their prompts' beginnings went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from agentspec.placement.policy import Call, Member
from agentspec.placement.prefix_table import MOST_HOLDERS, PrefixTable
from agentspec.placement.roster import Roster

LEAST_SHARE = 0.5  # of a prompt that must be known somewhere: below it, reading it anew costs less than a detour


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
        roster = Roster.of(members)
        return self.holder(call, roster) or roster.freest()

    def holder(self, call: Call, roster: Roster, *, most: int = MOST_HOLDERS) -> Member | None:
        """The freest member with room that has most of the prompt; None if there is none, or more than `most` have."""
        match = self.table.match(call.blocks)
        if match.blocks < LEAST_SHARE * len(call.blocks) or not 0 < len(match.holders) <= most:
            return None
        holders = [member for name in match.holders if (member := roster.find(name)) is not None]
        freest = min(holders, key=lambda member: (member.load, member.kv_use), default=None)
        return freest if freest is not None and roster.has_room(freest, self.bound) else None

    def placed(self, call: Call, member: Member) -> None:
        self.table.sent(call.blocks, member.name)

    def removed(self, name: str) -> None:
        self.table.forget(name)
