"""Counts what keys used, and brings the counts to the cache's database every few seconds."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

import anyio

from agentspec.cache.usage import KeepsUsage, UsageRow, day_of
from agentspec.errors import AgentSpecError
from agentspec.proxy.logs import logger
from agentspec.proxy.metering.key_limits import LimitsKeys, Owner
from agentspec.proxy.metering.window import DAY
from agentspec.proxy.request_record import RequestRecord
from agentspec.types import Usage

FLUSH_SECONDS = 5.0
SOON_SECONDS = 0.5  # until the store was reached for the first time
LAST_SECONDS = 10.0  # that the end waits for the last counts to be stored
_PATIENCE = 3  # failures in a row with something to store before the log says so

_Key = tuple[str, str, str, str]  # day, tenant, key and model


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows that are stored together, counted after `since`, and the name that tells a store that it has them."""

    rows: list[UsageRow]
    since: float
    name: str


@dataclass(slots=True)
class UsageMeter:
    """The counts that are not stored yet; `store` opens the store, in a thread. For one event loop.

    What cannot be stored waits for the next try, unchanged and under the same name: a store that has it, and could not
    say so, does not add it twice. `limits` are told what was stored, and what the day's total is now; with `reads_day`
    also while nothing happens here: other gateways may add to it.
    """

    store: Callable[[], KeepsUsage]
    limits: LimitsKeys
    clock: Callable[[], float] = time.time
    reads_day: bool = False
    _rows: dict[_Key, list[int]] = field(default_factory=dict)  # the counts of a row, changed in place: this is quick
    _day: tuple[int, str] = (-1, "")  # and how it is written
    _since: float = 0.0  # of the oldest of them
    _batch: _Batch | None = None  # that could not be stored, as far as is known
    _failures: int = 0
    _reached: bool = False
    _storing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def note(self, owner: Owner, record: RequestRecord, *, failed: bool, estimated: int) -> None:
        """Count a request that is over. `estimated` stands for its tokens where nobody told them."""
        now, used = self.clock(), record.usage or Usage()
        if not self._rows:
            self._since = now
        if int(now // DAY) != self._day[0]:
            self._day = int(now // DAY), day_of(now)
        accepted = record.speculation.accepted if record.speculation else 0
        tokens = (used.prompt_tokens, used.cached_tokens, used.completion_tokens, accepted, estimated)
        self._put((self._day[1], *owner, record.model or ""), (1, int(failed), *tokens))

    async def run(self) -> None:
        """Store what was counted every few seconds."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS if self._reached or not self.reads_day else SOON_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Store what was counted. Logs what goes wrong; the counts then wait."""
        async with self._storing:
            late = self._batch is not None
            if (self._rows or late or self.reads_day) and await self._flush() and late and self._rows:
                await self._flush()

    async def finish(self) -> None:
        """Store what is left, but do not wait for it for long."""
        with anyio.move_on_after(LAST_SECONDS, shield=True):
            await self.flush()
        if left := [*self._rows.values(), *(row.counts for row in (self._batch.rows if self._batch else ()))]:
            logger.warning("usage is not stored", requests=sum(counts[0] for counts in left))

    async def _flush(self) -> bool:
        """Store what could not be stored, else what was counted since; whether it is."""
        now, batch = self.clock(), self._batch or self._taken()
        self._batch = batch if batch.rows else None
        try:
            stored = await anyio.to_thread.run_sync(
                lambda: self.store().add(batch.rows, since=batch.since, day=day_of(now), batch=batch.name)
            )
        except Exception as error:
            self._warn(error)
            return False
        self._failures, self._reached, self._batch = 0, True, None
        self._tell(now, batch.rows, stored)
        return True

    def _taken(self) -> _Batch:
        rows, self._rows = [UsageRow(*key, *counts) for key, counts in self._rows.items()], {}
        return _Batch(rows, self._since, uuid4().hex)

    def _tell(self, now: float, rows: list[UsageRow], stored: Mapping[Owner, int]) -> None:
        amounts: Counter[Owner] = Counter()
        for row in rows:
            if row.day == day_of(now):
                amounts[row.owner] += row.tokens
        self.limits.recorded(int(now // DAY), amounts, stored)

    def _put(self, key: _Key, counts: Sequence[int]) -> None:
        """Add to what waits, in the order of `COUNTS`."""
        present = self._rows.get(key)
        if present is None:
            self._rows[key] = list(counts)
            return
        for place, count in enumerate(counts):
            if count:
                present[place] += count

    def _warn(self, error: Exception) -> None:
        self._failures += self._batch is not None
        if self._batch is not None and self._failures == _PATIENCE:
            reason = error.message if isinstance(error, AgentSpecError) else type(error).__name__
            logger.warning("usage cannot be stored now; the counts wait", error=reason)
