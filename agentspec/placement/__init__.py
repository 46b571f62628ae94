"""Which of several servers of the same model takes a call. Pure decisions: no connection, no clock of their own."""

from collections.abc import Callable, Mapping

from agentspec.placement.affinity import PrefixAffinity, WorkflowAffinity
from agentspec.placement.policy import Call, LeastLoaded, Member, PlacementPolicy, RoundRobin

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
    "Call",
    "LeastLoaded",
    "Member",
    "PlacementPolicy",
    "PrefixAffinity",
    "RoundRobin",
    "WorkflowAffinity",
]
