"""One server of a pool as this process sees it: whether it takes calls, how busy it is, how its calls ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.metrics import ServerLoad
from agentspec.backends.settings import FleetSettings
from agentspec.placement import Member
from agentspec.telemetry.samples import MemberSample

logger = logging.getLogger(__name__)

BreakerState = Literal["closed", "open", "half_open"]
MemberState = Literal["ready", "busy", "unhealthy", "erring", "half_open", "open"]
FAILED_PROBES = 2  # in a row, after which a server counts as unhealthy
FORGIVEN = (
    0.25  # of a failure, by each answer that begins: a server that fails more than a fifth of its calls is left out
)
_LAST_RESORT = ("busy", "unhealthy")


def current_time() -> float:
    """Seconds by the clock of the running loop, or of the system where none runs: they are the same."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


class CircuitBreaker:
    """Opens at `failures`, of which each answer that begins makes up for a quarter. After `open_seconds` it is half
    open: one trial decides (Nygard, *Release It!*, chapter 5), and another one each `open_seconds` while the earlier
    have not ended: an answer may take minutes to begin.

    `erring`: the last failure may be the call's own, of a server that answers.
    """

    def __init__(self, failures: int, open_seconds: float) -> None:
        self._most, self._open_seconds = failures, open_seconds
        self._failures = 0.0
        self._opened: float | None = None
        self._trial_at: float | None = None  # when the latest trial began, if one runs
        self.erring = False

    def state(self, now: float) -> BreakerState:
        if self._opened is None:
            return "closed"
        return "half_open" if now >= self._opened + self._open_seconds else "open"

    def allows(self, now: float) -> bool:
        """Whether a call may begin now. When half open, only a trial may."""
        at = self.trial_at()
        return at is None or now >= at

    def begin(self, now: float) -> bool:
        """Note that a call begins; returns whether it is a trial."""
        if self._opened is None or not self.allows(now):
            return False
        self._trial_at = now
        return True

    def succeeded(self, *, trial: bool = False) -> None:
        """Count an answer. Any answer of a server that was gone closes the breaker; if the server errs, only a trial's
        does, and the next failure opens it again.
        """
        if self._opened is None:
            self._failures = max(0.0, self._failures - FORGIVEN)
        elif trial or not self.erring:
            self._failures = self._most - 1 if self.erring else 0.0
            self._opened = self._trial_at = None

    def failed(self, now: float, *, trial: bool, erring: bool) -> None:
        """Count a failure. One of a call that began before the breaker opened does not prolong the time."""
        self._failures, self.erring = min(self._failures + 1, self._most), erring
        opens = self._failures >= self._most if self._opened is None else trial
        if opens:
            self._opened, self._trial_at = now, None

    def given_up(self) -> None:
        """Note that a trial ended without a result, so that another may begin."""
        self._trial_at = None

    def reached(self, now: float) -> None:
        """The server answers something else again: allow the trial at once. A trial that runs and has not failed has
        found the server, and closes the breaker.
        """
        if self._trial_at is not None:
            self.succeeded(trial=True)
        elif self._opened is not None:
            self._opened = min(self._opened, now - self._open_seconds)

    def trial_at(self) -> float | None:
        """When the next trial may begin; None while it is closed."""
        if self._opened is None:
            return None
        since = self._opened if self._trial_at is None else self._trial_at
        return since + self._open_seconds


class PoolMember:
    """A server. `name` is unique in the gateway and for operators: it may hold an address. Times are `current_time`'s.

    `lost` is called when the server has failed so that its caches are probably gone.
    """

    def __init__(
        self, name: str, group: str, backend: OpenAIBackend, settings: FleetSettings, lost: Callable[[str], None]
    ) -> None:
        self.name, self.group, self.backend = name, group, backend
        self.load: ServerLoad | None = None
        self.in_flight = self.calls = self.retries = self.failures = 0
        self.measure_at = 0.0  # when to ask for its metrics again
        self._others = self._failed_probes = 0
        self._breaker = CircuitBreaker(settings.failures, settings.open_seconds)
        self._unreachable = False  # the last failure: no answer at all
        self._busy_until = float("-inf")
        self._lost = lost

    def state(self, now: float) -> MemberState:
        breaker = self._breaker.state(now)
        if breaker != "closed":
            if self._breaker.allows(now):
                return "half_open"
            return "erring" if self._breaker.erring else "open"
        if self._failed_probes >= FAILED_PROBES:
            return "unhealthy"
        return "busy" if now < self._busy_until else "ready"

    def takes_calls(self, now: float, *, erring: bool = False, last_resort: bool = False) -> bool:
        """Whether a call may be sent; also to one that is `erring`, or, as a `last_resort`, seems not to be well."""
        state = self.state(now)
        return state in ("ready", "half_open") or (
            erring if state == "erring" else last_resort and state in _LAST_RESORT
        )

    def busy_until(self, now: float) -> float | None:
        """When it wants calls again, if it has asked to wait."""
        return self._busy_until if self.state(now) == "busy" else None

    def trial_at(self, now: float) -> float | None:
        """When its breaker allows a trial; None if that is not what it waits for."""
        return self._breaker.trial_at() if self.state(now) in ("open", "erring") else None

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
        return self._breaker.begin(current_time())

    def end(self, *, counted: bool, trial: bool) -> None:
        """Note that a call is over; `counted`: as an answer or a failure."""
        self.in_flight -= 1
        if trial and not counted:
            self._breaker.given_up()

    def succeeded(self, *, trial: bool) -> None:
        self._breaker.succeeded(trial=trial)
        self._failed_probes = 0

    def failed(self, *, unreachable: bool = False, erring: bool = False, trial: bool = False) -> None:
        """Count a failure. `unreachable`: there was no answer at all. `erring`: it may be the call's own, of a server
        that answers: an error, an answer that is late or breaks off. Such a server is left out for a while, unless all
        others of its pool are: no request closes a model.
        """
        self._unreachable = unreachable
        now = current_time()
        was_closed = self._breaker.state(now) == "closed"
        self.failures += 1
        self._breaker.failed(now, trial=trial, erring=erring)
        if was_closed and self._breaker.state(now) != "closed":
            logger.warning("%s fails too often and is left out for a while", self.name)
            if not erring:
                self._lost(self.name)

    def asked_to_wait(self, seconds: float) -> None:
        """Send nothing for so long, unless no other server takes calls."""
        self._busy_until = max(self._busy_until, current_time() + seconds)

    # What probes show.

    def probed(self, *, alive: bool) -> None:
        """Take in what a look at its health has shown."""
        if alive and self._failed_probes >= FAILED_PROBES:
            logger.info("%s answers /health again", self.name)
        self._failed_probes = 0 if alive else self._failed_probes + 1
        if alive and self._unreachable:
            self._breaker.reached(current_time())
        if self._failed_probes == FAILED_PROBES:
            logger.warning("%s does not answer /health: it gets calls only if no other server takes them", self.name)
            self._lost(self.name)

    def measured(self, load: ServerLoad | None) -> None:
        """Take in its own metrics. What they count beyond this process's calls comes from others."""
        self.load = load
        self._others = max(0, load.running + load.waiting - self.in_flight) if load else 0

    def sample(self) -> MemberSample:
        load = self.load
        return MemberSample(
            backend=self.group,
            member=self.name,
            state=self.state(current_time()),
            in_flight=self.in_flight,
            calls=self.calls,
            retries=self.retries,
            failures=self.failures,
            running=None if load is None else load.running,
            waiting=None if load is None else load.waiting,
            kv_use=None if load is None else load.kv_use,
        )
