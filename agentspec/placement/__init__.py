"""Which of several servers of the same model takes a call. Pure decisions: no connection, no clock of their own."""

from collections.abc import Callable, Mapping

from agentspec.placement.policy import PRESSED, Call, LeastLoaded, Member, PlacementPolicy, RoundRobin
from agentspec.placement.prefix import PrefixAffinity
from agentspec.placement.roster import Roster
from agentspec.placement.workflow import WorkflowAffinity

POLICIES: Mapping[str, Callable[[], PlacementPolicy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix": PrefixAffinity,
    "workflow": WorkflowAffinity,
}
"""The policies by the names that settings use. Each pool gets an instance of its own."""
DEFAULT_POLICY = "workflow"

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "PRESSED",
    "Call",
    "LeastLoaded",
    "Member",
    "PlacementPolicy",
    "PrefixAffinity",
    "Roster",
    "RoundRobin",
    "WorkflowAffinity",
]
