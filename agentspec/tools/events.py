"""What became of tools that were started early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["launch", "hit", "waste", "stale", "failed"]


@dataclass(frozen=True, slots=True)
class ToolEvent:
    """One early start, `launch`, or how it ended.

    `hit`: its result was used. `waste`: no call came for it. `stale`: another call may have changed something since,
    or it was too old. `failed`: the tool raised; it ran again. `seconds` is what a hit saved, or how long any other
    ran. Arguments and results are not in it.
    """

    outcome: Outcome
    tool: str
    tenant: str
    agent: str
    session: str
    seconds: float
