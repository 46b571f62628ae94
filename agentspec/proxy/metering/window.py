"""Amounts of the last 60 seconds, and of the present day. Clocks are the caller's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

WINDOW = 60  # seconds
DAY = 86400


@dataclass(slots=True)
class SlidingWindow:
    """The sum of what was added in the last 60 whole seconds, the present one included.

    `now` is in whole seconds of a clock that never goes back.
    """

    total: int = 0
    _now: int = 0
    _slots: list[int] = field(default_factory=lambda: [0] * WINDOW)

    def advance(self, now: int) -> None:
        """Drop what is too old at `now`."""
        for second in range(self._now + 1, min(now, self._now + WINDOW) + 1):
            self.total -= self._slots[second % WINDOW]
            self._slots[second % WINDOW] = 0
        self._now = max(self._now, now)

    def add(self, amount: int) -> None:
        """Add to the present second."""
        self.total += amount
        self._slots[self._now % WINDOW] += amount

    def give_back(self, second: int, amount: int) -> None:
        """Take from `second` what was added there, unless it has gone already."""
        if self._now - WINDOW < second <= self._now:
            self.total -= amount
            self._slots[second % WINDOW] -= amount

    def wait(self, amount: int, limit: int) -> int:
        """Seconds until `amount` more, at most `limit`, stays within it if nothing else is added."""
        left, wait = self.total, 0
        while left + amount > limit and wait < WINDOW:
            wait += 1  # then the oldest second of those that are left is gone
            left -= self._slots[(self._now + wait) % WINDOW]
        return wait

    @property
    def reset(self) -> int:
        """Seconds until nothing is left."""
        return next((wait for wait in range(WINDOW, 0, -1) if self._slots[(self._now + wait) % WINDOW]), 0)


@dataclass(slots=True)
class DayCount:
    """The sum of a day, UTC: what is `stored`, what was `used` since that was read, and what is `reserved` for requests
    that run. `stored` comes from a database that others add to, too.

    `time` is in seconds since 1970.
    """

    day: int = 0  # since 1970
    stored: int = 0
    used: int = 0
    reserved: int = 0

    @property
    def total(self) -> int:
        return self.stored + self.used + self.reserved

    def advance(self, time: float) -> None:
        """Begin a new count if it is another day. What runs is counted at its end, in the day in which that is.

        A clock that is set back a little repeats no day; one that was days ahead would stop the key for days.
        """
        if (day := int(time // DAY)) > self.day or day < self.day - 1:
            self.day, self.stored, self.used, self.reserved = day, 0, 0, 0

    def settle(self, day: int, reserved: int, used: int) -> None:
        """A request is over for which something was reserved on `day`."""
        if day == self.day:
            self.reserved = max(0, self.reserved - reserved)  # less is there if the clock left the day and came back
        self.used += used

    def recorded(self, day: int, amount: int, stored: int) -> None:
        """Of what was used, `amount` is stored now, and `stored` is all of it. What was read before never counts back:
        reports of several processes can pass each other.
        """
        if day == self.day:
            self.used = max(0, self.used - amount)
            self.stored = max(self.stored, stored)

    def wait(self, time: float, amount: int, limit: int) -> int:
        """Seconds until `amount` more stays within the limit: none, or those to midnight."""
        return 0 if self.total + amount <= limit else self.reset(time)

    def reset(self, time: float) -> int:
        """Whole seconds until midnight."""
        return max(1, math.ceil((self.day + 1) * DAY - time))
