"""A circuit breaker: spares a failing server, and its callers, further calls for a while."""

from __future__ import annotations

from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """Opens after `failures` in a row. After `open_seconds` it is half open: one trial decides (Nygard, *Release It!*,
    chapter 5), and another one each `open_seconds` as long as none has: an answer may take minutes to begin. Times are
    seconds of any clock.
    """

    __slots__ = ("_in_a_row", "_most", "_open_seconds", "_opened", "_trial_at")

    def __init__(self, failures: int, open_seconds: float) -> None:
        self._most, self._open_seconds = failures, open_seconds
        self._in_a_row = 0
        self._opened: float | None = None
        self._trial_at: float | None = None  # when the latest trial began, if one runs

    def state(self, now: float) -> BreakerState:
        if self._opened is None:
            return "closed"
        return "half_open" if now >= self._opened + self._open_seconds else "open"

    def allows(self, now: float) -> bool:
        """Whether a call may begin now. When half open, few may beside the trial."""
        at = self.trial_at()
        return at is None or now >= at

    def begin(self, now: float) -> bool:
        """Note that a call begins, which was allowed; returns whether it is a trial."""
        if self._opened is None:
            return False
        self._trial_at = now
        return True

    def succeeded(self) -> None:
        self._in_a_row, self._opened, self._trial_at = 0, None, None

    def failed(self, now: float, *, trial: bool = False) -> None:
        """Count a failure. One of a call that began before the breaker opened does not prolong the time."""
        self._in_a_row += 1
        opens = self._in_a_row >= self._most if self._opened is None else trial
        if opens:
            self._opened, self._trial_at = now, None

    def given_up(self) -> None:
        """Note that a trial ended without telling anything, so that another may begin."""
        self._trial_at = None

    def reached(self, now: float) -> None:
        """Something else has shown that the server is back: allow the trial at once. One that runs by now, and has not
        failed, has found the server: nobody need wait for its answer.
        """
        if self._trial_at is not None:
            self.succeeded()
        elif self._opened is not None:
            self._opened = min(self._opened, now - self._open_seconds)

    def trial_at(self) -> float | None:
        """When the next trial may begin; None while it is closed."""
        if self._opened is None:
            return None
        since = self._opened if self._trial_at is None else self._trial_at
        return since + self._open_seconds
