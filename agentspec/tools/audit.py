"""What became of tools that were started early: an event for each launch and its end, and totals by tool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from agentspec.step.tool_report import ToolStatistics, statistics
from agentspec.tools.faults import kept_from_agent
from agentspec.tools.flights import Launch
from agentspec.tools.keys import AgentCaller

_log = logging.getLogger("agentspec.tools.audit")

Outcome = Literal["launch", "hit", "waste", "stale", "failed"]


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One launch, or how it ended.

    `hit`: its result was used. `waste`: no call came for it. `stale`: another call may have changed something since,
    or it was too old. `failed`: the tool raised; it ran again. `key` is a hash of the call, `seconds` what a hit
    saved, or how long any other ran. `named` tells a start once the model had written a tool's name from one before
    its turn. Arguments and results are not in it.
    """

    outcome: Outcome
    tool: str
    tenant: str
    agent: str
    session: str
    key: str
    probability: float
    seconds: float
    named: bool = False


class ToolAudit:
    """Logs every event (logger `agentspec.tools.audit`, level INFO), passes it on, and adds it up. Thread-safe."""

    def __init__(
        self, listener: Callable[[AuditEvent], None] | None = None, totals: ToolStatistics = statistics
    ) -> None:
        self._listener = listener
        self._totals = totals

    def record(self, outcome: Outcome, launch: Launch, caller: AgentCaller, seconds: float = 0.0) -> None:
        tool = launch.call.name
        names = (tool, caller.tenant, caller.agent, caller.session, launch.key)
        event = AuditEvent(outcome, *names, launch.probability, seconds, launch.named)
        self._totals.add(tool, outcome, seconds)
        _log.info(
            "%s tool=%s tenant=%s agent=%s session=%s key=%.12s probability=%.2f seconds=%.3f named=%s",
            outcome, *names, launch.probability, seconds, launch.named,
        )  # fmt: skip
        if self._listener is not None:
            with kept_from_agent("on_event"):
                self._listener(event)

    def call(self, tool: str) -> None:
        """Count a call that the model made of a tool that may run early."""
        self._totals.add(tool, "call", 0.0)
