"""The queue of waiting requests, ordered by priority, then by least service so far, then by arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import count

from agentspec.backends.torch.engine.request import EngineRequest

MOST_FLOWS = 4096  # tenants or sessions whose service is remembered


class ServiceCounters:
    """Tokens computed for each flow (tenant or session), so that a flow with many requests cannot starve the others.

    A flow that joins the queue starts at least at the count of the least served waiting flow: being idle earns no
    credit (virtual token counters; Sheng et al. 2024, "Fairness in Serving Large Language Models", section 4).
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[Hashable, float] = OrderedDict()

    def of(self, flow: Hashable) -> float:
        return self._tokens.get(flow, 0.0)

    def charge(self, flow: Hashable, tokens: float) -> None:
        self._tokens[flow] = self.of(flow) + tokens
        self._tokens.move_to_end(flow)
        if len(self._tokens) > MOST_FLOWS:
            self._tokens.popitem(last=False)

    def lift(self, flow: Hashable, present: set[Hashable]) -> None:
        """Raise the count of `flow`, if it is not among the flows `present`, to the least count of these."""
        floor = min((self.of(other) for other in present), default=0.0)
        if flow not in present and self.of(flow) < floor:
            self._tokens[flow] = floor


class FairQueue:
    """Waiting requests. At equal priority, preempted requests come before new ones, then the least served tenant comes
    first, and within a tenant the least served session. Not thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: dict[EngineRequest, int] = {}
        self._tenants, self._sessions = ServiceCounters(), ServiceCounters()
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self._waiting)

    def __contains__(self, request: object) -> bool:
        return request in self._waiting

    def push(self, request: EngineRequest) -> None:
        self._tenants.lift(request.tenant, {other.tenant for other in self._waiting})
        self._sessions.lift(session_of(request), {session_of(other) for other in self._waiting})
        self._waiting[request] = next(self._arrivals)

    def push_preempted(self, request: EngineRequest) -> None:
        """Queue a request that was already running and was preempted."""
        self._waiting[request] = -next(self._arrivals) - 1

    def first(self) -> EngineRequest | None:
        """The next request, which stays in the queue; None if the queue is empty."""
        return min(self._waiting, key=self._rank, default=None)

    def remove(self, request: EngineRequest) -> None:
        del self._waiting[request]

    def clear(self) -> None:
        self._waiting.clear()

    def charge(self, request: EngineRequest, tokens: int) -> None:
        """Charge `tokens` computed tokens to the request's tenant and session."""
        self._tenants.charge(request.tenant, tokens)
        self._sessions.charge(session_of(request), tokens)

    def _rank(self, request: EngineRequest) -> tuple[int, bool, float, float, int]:
        arrival = self._waiting[request]
        served = self._tenants.of(request.tenant), self._sessions.of(session_of(request))
        return request.priority, arrival >= 0, *served, arrival


def session_of(request: EngineRequest) -> Hashable:
    """The session that a request belongs to; a tenant's requests without a session label share one."""
    return request.tenant, request.original.labels.session
