"""Whose turn it is among one tenant's waiting requests: by arrival, or by the programs that they belong to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass

from agentspec.errors import InvalidRequestError
from agentspec.placement.ordering import ArrivalOrder, CallQueue, Programs, Urgency, UrgencyOrder
from agentspec.protocol.headers import SESSION_FINAL, read_labels, read_policy
from agentspec.proxy.admission.identity import identified
from agentspec.settings.server import ServerSettings

Line = CallQueue[asyncio.Future[None]]
_ANY = Urgency()
_SHORTEST = 0.1  # seconds of patience, where requests may hardly wait


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """What a request's headers say of its program. `deadline_s` counts from now, `final` marks a session's last one."""

    session: str
    workflow: str | None = None
    step: str | None = None
    deadline_s: float | None = None
    final: bool = False

    @property
    def fields(self) -> tuple[str, str | None, str | None, float | None, bool]:
        """The fields, to be told to another process."""
        return astuple(self)


def program_call(headers: Mapping[str, str]) -> ProgramCall | None:
    """The program of a request; None without a session, and for headers that it will be refused for."""
    try:
        labels, policy = identified(read_labels(headers), headers, {}), read_policy(headers)
    except InvalidRequestError:
        return None
    if labels.session is None:
        return None
    final = headers.get(SESSION_FINAL, "").strip().lower() == "true"
    return ProgramCall(labels.session, labels.workflow, labels.step, policy.deadline_s, final)


class Turns:
    """The order of a limiter's lines (`server.order`), and the history that it goes by.

    A request of one tenant is only ever compared with the same tenant's. One that waits is overtaken by none that came
    more than half of `server.queue_timeout` later, so that an order alone makes no request wait too long.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._by_program = settings.order == "workflow"
        self._programs = Programs()
        self.update(settings, ())

    def update(self, settings: ServerSettings, lines: Iterable[Line]) -> None:
        """Go by another `queue_timeout` from now on, also in `lines`; who waits there keeps what held when it came."""
        self._patience = max(_SHORTEST, settings.queue_timeout / 2)
        for line in lines:
            if isinstance(line, UrgencyOrder):
                line.patience = self._patience

    def line(self) -> Line:
        """An empty line."""
        return UrgencyOrder(self._patience) if self._by_program else ArrivalOrder()

    def sent(self, tenant: str, call: ProgramCall | None, now: float) -> Urgency:
        """A request has come; how urgent it is."""
        if call is None or not self._by_program:
            return _ANY
        session, workflow = _of(tenant, call)
        self._programs.sent(session, workflow, call.step, now)
        deadline = None if call.deadline_s is None else now + call.deadline_s
        return self._programs.urgency(session, workflow, call.step, deadline)

    def forget(self, tenant: str, call: ProgramCall | None, came: float) -> None:
        """A request that came at `came` goes without having had a place. One that is sent anew is another one."""
        if call is not None and self._by_program:
            self._programs.forget(_of(tenant, call)[0], came)

    def served(self, tenant: str, call: ProgramCall | None, *, waited: float, seconds: float, now: float) -> None:
        """A request that had waited, and then had a place for `seconds`, is over."""
        if call is None or not self._by_program:
            return
        session, _ = _of(tenant, call)
        self._programs.served(session, waited=waited, seconds=seconds, at=now)
        if call.final:
            self._programs.end(session)


def _of(tenant: str, call: ProgramCall) -> tuple[str, str]:
    """Names of session and workflow that no other tenant's are equal to."""
    return f"{tenant}\0{call.session}", f"{tenant}\0{call.workflow or ''}"
