"""Who is served next: by priority, then whoever was served least, then in order of arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import count

from agentspec.backends.torch.engine.sequence import EngineRequest

MOST_FLOWS = 4096  # tenants and sessions whose service is remembered


class ServiceCounters:
    """Tokens computed for each flow of requests, so that one who asks much cannot push others back.

    A flow that comes (back) starts where the least served of those who wait stands: being idle earns no credit
    (virtual token counters; Sheng et al. 2024, "Fairness in Serving Large Language Models", section 4).
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
        """`flow` comes to those `present`."""
        floor = min((self.of(other) for other in present), default=0.0)
        if flow not in present and self.of(flow) < floor:
            self._tokens[flow] = floor


class FairQueue:
    """Waiting jobs. Between jobs of one priority the tenant that was served least comes first, inside a tenant the
    session that was; those put back come before those not begun. Not thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: dict[EngineRequest, int] = {}
        self._tenants, self._sessions = ServiceCounters(), ServiceCounters()
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job: object) -> bool:
        return job in self._waiting

    def push(self, job: EngineRequest) -> None:
        self._tenants.lift(tenant_of(job), {tenant_of(other) for other in self._waiting})
        self._sessions.lift(session_of(job), {session_of(other) for other in self._waiting})
        self._waiting[job] = next(self._arrivals)

    def put_back(self, job: EngineRequest) -> None:
        """A job that was begun and had to make room."""
        self._waiting[job] = -next(self._arrivals) - 1

    def first(self) -> EngineRequest | None:
        """Whose turn it is; the job stays in the queue."""
        return min(self._waiting, key=self._rank, default=None)

    def remove(self, job: EngineRequest) -> None:
        del self._waiting[job]

    def clear(self) -> None:
        self._waiting.clear()

    def charge(self, job: EngineRequest, tokens: int) -> None:
        """So many tokens were computed for it."""
        self._tenants.charge(tenant_of(job), tokens)
        self._sessions.charge(session_of(job), tokens)

    def _rank(self, job: EngineRequest) -> tuple[int, bool, float, float, int]:
        arrival = self._waiting[job]
        served = self._tenants.of(tenant_of(job)), self._sessions.of(session_of(job))
        return job.request.priority, arrival >= 0, *served, arrival


def tenant_of(job: EngineRequest) -> Hashable:
    return job.request.tenant


def session_of(job: EngineRequest) -> Hashable:
    """The conversation that a job belongs to; jobs without a name for it share one."""
    return job.request.tenant, job.request.labels.session
