"""Usage of a process without a database. It is gone at its exit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from agentspec.cache.deletion import Scope, Selection
from agentspec.cache.usage.row import BATCH_SECONDS, LOOK_SECONDS, Owner, UsageRow, forgets_tenant, last_day, oldest_day


class MemoryUsage:
    """A `UsageStore` in memory."""

    def __init__(self, days: int) -> None:
        self._days = days
        self._lock = threading.Lock()
        self._batches: dict[str, float] = {}
        self._forgotten: list[tuple[float, Scope]] = []  # and when
        self._rows: dict[tuple[str, str, str, str], UsageRow] = {}
        self._look_at = 0.0  # when what is too old is looked for, in seconds since 1970

    def add(self, rows: Sequence[UsageRow], *, since: float, day: str, batch: str | None = None) -> Mapping[Owner, int]:
        if time.time() >= self._look_at:  # nothing else may call `maintain` of a cache in memory
            self.maintain()
        with self._lock:
            known = batch in self._batches
            if batch is not None:
                self._batches[batch] = time.time()
            scopes = [scope for at, scope in self._forgotten if at >= since]
            for row in () if known else rows:
                if any(forgets_tenant(scope, row.tenant) for scope in scopes):
                    continue
                key = (row.day, row.tenant, row.key, row.model)
                present = self._rows.get(key)
                self._rows[key] = row if present is None else present.plus(row)
            totals: Counter[Owner] = Counter()
            for row in self._rows.values():
                if row.day == day:
                    totals[row.owner] += row.tokens
            return totals

    def read(
        self, *, tenant: str | None = None, model: str | None = None, since: str = "", until: str = "9999"
    ) -> list[UsageRow]:
        with self._lock:
            found = sorted(self._rows.items())
        return [
            row
            for _, row in found
            if since <= row.day <= until and tenant in (None, row.tenant) and model in (None, row.model)
        ]

    def forget(self, selection: Selection) -> int:
        last = last_day(selection)
        if last is None:
            return 0
        with self._lock:
            self._forgotten.append((time.time(), selection.scope))
        return self._remove(lambda row: row.tenant == selection.tenant and row.day <= last)

    def maintain(self) -> None:
        self._look_at = time.time() + LOOK_SECONDS
        oldest = oldest_day(time.time(), self._days)
        self._remove(lambda row: row.day < oldest)
        with self._lock:
            old = time.time() - BATCH_SECONDS
            self._batches = {name: stored for name, stored in self._batches.items() if stored > old}
            self._forgotten = [one for one in self._forgotten if one[0] > old]

    def _remove(self, goes: Callable[[UsageRow], bool]) -> int:
        with self._lock:
            gone = [key for key, row in self._rows.items() if goes(row)]
            for key in gone:
                del self._rows[key]
            return len(gone)
