"""How many retries a pool may send: so many that they help, too few to bring down servers that are overloaded."""

from __future__ import annotations

from collections import deque

WINDOW = 10  # seconds


class RetryBudget:
    """Allows as many retries in 10 seconds as `share` of their calls, or `floor` a second if those are more.

    They may come at once, since a server that dies fails all of its calls in one moment. The scheme of Finagle's and
    Linkerd's retry budgets. Times are seconds of any clock that does not go back.
    """

    def __init__(self, share: float, floor: float) -> None:
        self._share, self._floor = share, floor * WINDOW
        self._seconds: deque[list[int]] = deque()  # [second, calls, retries]
        self._calls = self._retries = 0

    def called(self, now: float) -> None:
        """Count a call, its retries not among them."""
        self._slot(now)[1] += 1
        self._calls += 1

    def take(self, now: float) -> bool:
        """Whether a retry may be sent now; it is counted if so."""
        slot = self._slot(now)
        if self._retries >= max(self._floor, self._share * self._calls):
            return False
        slot[2] += 1
        self._retries += 1
        return True

    def _slot(self, now: float) -> list[int]:
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        while self._seconds[0][0] <= second - WINDOW:
            _, calls, retries = self._seconds.popleft()
            self._calls -= calls
            self._retries -= retries
        return self._seconds[-1]
