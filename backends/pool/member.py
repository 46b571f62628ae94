"""One server of a pool as this process sees it: whether it takes calls, how busy it is, how its calls ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Literal

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.metrics import ServerLoad
from agentspec.backends.settings import FleetSettings
from agentspec.placement import Member
from agentspec.telemetry.samples import MemberSample

logger = logging.getLogger(__name__)

MemberState = Literal["ready", "busy", "unhealthy", "erring", "half_open", "open"]
FAILED_PROBES = 2  # in a row, after which a server counts as unhealthy
FORGIVEN = (
    0.25  # of a failure, by each answer that begins: a server that fails more than a fifth of its calls is left out
)


def current_time() -> float:
    """Seconds by the clock of the running loop, or of the system where none runs: they are the same."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


class PoolMember:
    """A server. `name` is unique in the gateway and for operators: it may hold an address. Times are `current_time`'s.

    Its circuit breaker (Nygard, *Release It!*, chapter 5) opens at `failures`, of which each answer that begins makes
    up for a quarter. After `open_seconds` one trial decides, and another one each `open_seconds` while the earlier have
    not ended: an answer may take minutes to begin. `lost` is called when the server's caches are probably gone.
    """

    def __init__(
        self, name: str, group: str, backend: OpenAIBackend, settings: FleetSettings, lost: Callable[[str], None]
    ) -> None:
        self.name, self.group, self.backend = name, group, backend
        self.load: ServerLoad | None = None
        self.in_flight = self.calls = self.retries = self.failures = 0
        self._settings, self._lost = settings, lost
        self._counted = 0.0  # failures that answers have not made up for
        self._opened: float | None = None  # when the breaker opened, if it is open
        self._trial: float | None = None  # when the latest trial began, if one runs
        self._erring = False  # the last failure may be the call's own, of a server that answers
        self._unreachable = False  # the last failure: no answer at all
        self._busy_until = float("-inf")
        self._others = self._failed_probes = 0

    def state(self, now: float) -> MemberState:
        if self._opened is not None:
            if now >= self._trial_at(self._opened):
                return "half_open"
            return "erring" if self._erring else "open"
        if self._failed_probes >= FAILED_PROBES:
            return "unhealthy"
        return "busy" if now < self._busy_until else "ready"

    def _trial_at(self, opened: float) -> float:
        return (opened if self._trial is None else self._trial) + self._settings.open_seconds

    def takes_calls(self, now: float, *, erring: bool = False, last_resort: bool = False) -> bool:
        """Whether a call may be sent; also to one that is `erring`, or, as a `last_resort`, seems not to be well."""
        state = self.state(now)
        return (
            state in ("ready", "half_open")
            or (erring and state == "erring")
            or (last_resort and state in ("busy", "unhealthy"))
        )

    def busy_until(self, now: float) -> float | None:
        """When it wants calls again, if it has asked to wait."""
        return self._busy_until if self.state(now) == "busy" else None

    def trial_at(self, now: float) -> float | None:
        """When the breaker allows the next trial; None if calls do not wait for it."""
        return None if self._opened is None or self.state(now) == "half_open" else self._trial_at(self._opened)

    def seen(self) -> Member:
        """What policies see of it."""
        waiting, kv_use = (self.load.waiting, self.load.kv_use) if self.load else (0, 0.0)
        return Member(self.name, self.in_flight, self._others, waiting, kv_use)

    # What happens to calls.

    def begin(self, *, retry: bool) -> bool:
        """Note that a call is sent; returns whether it is a trial of the breaker's. `end` follows, after at most one of
        `succeeded` and `failed`.
        """
        self.in_flight += 1
        self.calls += 1
        self.retries += retry
        now = current_time()
        trial = self._opened is not None and now >= self._trial_at(self._opened)
        if trial:
            self._trial = now
        return trial

    def end(self, *, counted: bool, trial: bool) -> None:
        """Note that a call is over; `counted`: as an answer or a failure."""
        self.in_flight -= 1
        if trial and not counted:
            self._trial = None

    def succeeded(self, *, trial: bool) -> None:
        """Count an answer. Any answer of a server that was gone closes the breaker; if the server errs, only a trial's
        does, and the next failure opens it again.
        """
        self._failed_probes = 0
        if self._opened is None:
            self._counted = max(0.0, self._counted - FORGIVEN)
        elif trial or not self._erring:
            self._counted = self._settings.failures - 1 if self._erring else 0.0
            self._opened = self._trial = None

    def failed(self, *, unreachable: bool = False, erring: bool = False, trial: bool = False) -> None:
        """Count a failure. `unreachable`: there was no answer at all. `erring`: it may be the call's own, of a server
        that answers: an error, an answer that is late or breaks off. Such a server is left out for a while, unless all
        others of its pool are: no request closes a model.
        """
        self.failures += 1
        self._unreachable, self._erring = unreachable, erring
        self._counted = min(self._counted + 1, self._settings.failures)
        was_closed = self._opened is None
        if self._counted >= self._settings.failures if was_closed else trial:  # else the call began before it opened
            self._opened, self._trial = current_time(), None
        if was_closed and self._opened is not None:
            logger.warning("%s fails too often and is left out for a while", self.name)
            if not erring:
                self._lost(self.name)

    def asked_to_wait(self, seconds: float) -> None:
        """Send nothing for so long, unless no other server takes calls."""
        self._busy_until = max(self._busy_until, current_time() + seconds)

    # What probes show.

    def probed(self, *, alive: bool) -> None:
        """Take in what a look at its health has shown. A server that is reachable again is tried at once."""
        if alive and self._failed_probes >= FAILED_PROBES:
            logger.info("%s answers /health again", self.name)
        self._failed_probes = 0 if alive else self._failed_probes + 1
        if alive and self._unreachable and self._trial is not None:  # which has not failed: it has found the server
            self.succeeded(trial=True)
        elif alive and self._unreachable and self._opened is not None:
            self._opened = min(self._opened, current_time() - self._settings.open_seconds)
        if self._failed_probes == FAILED_PROBES:
            logger.warning("%s does not answer /health: it gets calls only if no other server takes them", self.name)
            self._lost(self.name)

    def measured(self, load: ServerLoad | None) -> None:
        """Take in its own metrics. What they count beyond this process's calls comes from others."""
        self.load = load
        self._others = max(0, load.running + load.waiting - self.in_flight) if load else 0

    def sample(self) -> MemberSample:
        load = {} if self.load is None else asdict(self.load)
        return MemberSample(
            backend=self.group,
            member=self.name,
            state=self.state(current_time()),
            in_flight=self.in_flight,
            calls=self.calls,
            retries=self.retries,
            failures=self.failures,
            **load,
        )
