"""Which of several servers of the same model takes a call. Pure decisions: no connection, no clock of their own."""

from agentspec.placement.policy import Call, LeastLoaded, Member, PlacementPolicy, RoundRobin

__all__ = ["Call", "LeastLoaded", "Member", "PlacementPolicy", "RoundRobin"]
