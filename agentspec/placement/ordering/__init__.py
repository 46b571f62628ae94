"""Which of several waiting calls is next: by arrival, or by what is known of the programs that they belong to."""

from agentspec.placement.ordering.programs import Programs
from agentspec.placement.ordering.queue import ArrivalOrder, CallQueue, Urgency, UrgencyOrder

__all__ = ["ArrivalOrder", "CallQueue", "Programs", "Urgency", "UrgencyOrder"]
