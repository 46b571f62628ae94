"""Queues of waiting calls: by arrival, and by urgency."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Urgency:
    """What an order knows of a call. Times are of one clock, in seconds.

    `attained` is the service that its program has had. With a deadline the program should be in time if the call starts
    by `start_by`, the deadline less the expected remaining time, and can hardly be after `lost_after`.
    """

    attained: float = 0.0
    start_by: float | None = None
    lost_after: float = float("inf")


class CallQueue(Protocol[T]):
    """Calls that wait. `pop` says whose turn it is at the time `now`; `pressed` that KV caches are nearly full."""

    def __len__(self) -> int: ...

    def push(self, call: T, urgency: Urgency, now: float) -> None: ...

    def pop(self, now: float, *, pressed: bool = False) -> T: ...

    def remove(self, call: T) -> bool: ...


class ArrivalOrder(Generic[T]):
    """First come, first served."""

    def __init__(self) -> None:
        self._calls: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    def push(self, call: T, urgency: Urgency, now: float) -> None:
        self._calls.append(call)

    def pop(self, now: float, *, pressed: bool = False) -> T:
        """The call that waits longest. Raises `IndexError` if none waits."""
        return self._calls.popleft()

    def remove(self, call: T) -> bool:
        """Take a call out of the line; false if it is not there."""
        try:
            self._calls.remove(call)
        except ValueError:
            return False
        return True


@dataclass(slots=True)
class _Waiting(Generic[T]):
    call: T
    latest: float
    lost_after: float
    gone: bool = False


class UrgencyOrder(Generic[T]):
    """The call that has to start first, where each has a time by which it should.

    With a deadline that is the latest start that meets it: the least slack goes first (HexGen-Flow). Without
    one it is the arrival, put off by the service that the program has had: the least attained service goes first, and
    waiting makes up for it (Autellix). A deadline that can hardly be met any more gives way to those that
    can. Either time lies between the arrival and `patience` seconds later, so that no call is served before one that
    came `patience` earlier. Calls must be hashable. Each operation costs O(log n).

    Under KV pressure programs that have begun go first, since new ones would evict what those need again; a call of a
    new program is then never overtaken by one that came `2 * patience` later.
    """

    def __init__(self, patience: float = 30.0) -> None:
        if not patience > 0:
            raise ValueError(f"patience must be above 0 seconds, not {patience}")
        self.patience = patience
        self._begun: list[tuple[float, int, _Waiting[T]]] = []
        self._new: list[tuple[float, int, _Waiting[T]]] = []
        self._waiting: dict[T, _Waiting[T]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, call: T, urgency: Urgency, now: float) -> None:
        latest = now + self.patience
        start_by = now + urgency.attained if urgency.start_by is None else max(now, urgency.start_by)
        waiting = self._waiting[call] = _Waiting(call, latest, urgency.lost_after)
        heap = self._begun if urgency.attained else self._new
        self._put(heap, min(start_by, latest), waiting)

    def pop(self, now: float, *, pressed: bool = False) -> T:
        """The call whose turn it is. Raises `IndexError` if none waits."""
        begun, new = self._head(self._begun, now), self._head(self._new, now)
        if begun is None or new is None:
            heap = self._new if begun is None else self._begun
        else:
            first = pressed and new > now - self.patience
            heap = self._begun if first or begun < new else self._new
        waiting = heappop(heap)[2]
        del self._waiting[waiting.call]
        return waiting.call

    def remove(self, call: T) -> bool:
        """Take a call out of the line; false if it is not there."""
        waiting = self._waiting.pop(call, None)
        if waiting is None:
            return False
        waiting.gone = True
        return True

    def _put(self, heap: list[tuple[float, int, _Waiting[T]]], start_by: float, waiting: _Waiting[T]) -> None:
        self._number += 1
        heappush(heap, (start_by, self._number, waiting))

    def _head(self, heap: list[tuple[float, int, _Waiting[T]]], now: float) -> float | None:
        """When the first call of the heap has to start; calls that have left or lost their deadline make way."""
        while heap:
            start_by, _, waiting = heap[0]
            lost = waiting.lost_after < now and start_by < waiting.latest
            if not (waiting.gone or lost):
                return start_by
            heappop(heap)
            if not waiting.gone:
                self._put(heap, waiting.latest, waiting)
        return None
