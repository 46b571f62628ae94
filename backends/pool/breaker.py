"""A circuit breaker: spares a failing server, and its callers, further calls for a while."""

from __future__ import annotations

from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """Opens after `failures` in a row. After `open_seconds` it is half open: one trial decides (Nygard, *Release It!*,
    chapter 5). Times are seconds of any clock.
    """

    __slots__ = ("_in_a_row", "_most", "_open_seconds", "_opened", "_trial")

    def __init__(self, failures: int, open_seconds: float) -> None:
        self._most, self._open_seconds = failures, open_seconds
        self._in_a_row = 0
        self._opened: float | None = None
        self._trial = False

    def state(self, now: float) -> BreakerState:
        if self._opened is None:
            return "closed"
        return "half_open" if now >= self._opened + self._open_seconds else "open"

    def allows(self, now: float) -> bool:
        """Whether a call may begin now. When half open, none may beside the trial."""
        return self._opened is None or (not self._trial and self.state(now) == "half_open")

    def begin(self) -> None:
        """Note that a call begins, which was allowed."""
        self._trial = self._opened is not None

    def succeeded(self) -> None:
        self._in_a_row, self._opened, self._trial = 0, None, False

    def failed(self, now: float) -> None:
        """Count a failure. One of a call that began before the breaker opened does not prolong the time."""
        self._in_a_row += 1
        if self._trial or (self._opened is None and self._in_a_row >= self._most):
            self._opened, self._trial = now, False

    def given_up(self) -> None:
        """Note that a call ended without telling anything, so that another may be the trial."""
        self._trial = False

    def half_open(self, now: float) -> None:
        """Allow the trial at once: something else has shown that the server is back."""
        if self._opened is not None:
            self._opened = min(self._opened, now - self._open_seconds)

    def trial_at(self) -> float | None:
        """When the trial may begin; None while it is closed."""
        return None if self._opened is None else self._opened + self._open_seconds
