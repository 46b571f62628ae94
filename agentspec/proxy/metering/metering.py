"""What stands around every request for a model: the limits of its key, and the count of what it used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import anyio
from starlette.requests import ClientDisconnect

from agentspec.errors import RateLimitError
from agentspec.proxy.metering.demand import Demand, demand_of, may_hold_media
from agentspec.proxy.metering.headers import anthropic_headers, openai_headers
from agentspec.proxy.metering.key_limits import KeyLimits, LimitsKeys, Settle
from agentspec.proxy.metering.limiter import Standing
from agentspec.proxy.metering.usage_meter import UsageMeter
from agentspec.proxy.request_record import RequestRecord
from agentspec.settings.server import ServerSettings
from agentspec.telemetry.metrics import Metrics

Run = Callable[..., Awaitable[Demand]]
_FREE = nullcontext()


@dataclass(slots=True)
class Metering:
    """Limits and counts the requests of all keys; without keys it does nothing.

    Without a `meter` nothing is stored. `elsewhere`: another process does it all for what comes here. `close` closes
    the store of this process.
    """

    limits: LimitsKeys = field(default_factory=KeyLimits)
    meter: UsageMeter | None = None
    metrics: Metrics | None = None
    elsewhere: bool = False
    close: Callable[[], None] = lambda: None
    has_keys: bool = False

    def update(self, settings: ServerSettings) -> None:
        """Use other keys and limits for the requests to come."""
        self.has_keys = bool(settings.api_keys) and not self.elsewhere
        self.limits.update(settings)
        if self.meter is not None:
            limits = settings.limits_of_keys.values()
            self.meter.reads_day = self.has_keys and any(one.tokens_per_day for one in limits)

    async def begin(self) -> None:
        """Read what keys used today, before requests come."""
        if self.meter is not None:
            await self.meter.flush()

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Store what is counted from time to time, and at the end."""
        task = None if self.meter is None else asyncio.create_task(self.meter.run())
        try:
            yield
        finally:
            if self.meter is not None and task is not None:
                await self.meter.finish()  # first: nobody could tell what was stored if the task ended in its midst
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await anyio.to_thread.run_sync(self.close)

    async def within_limits(
        self, record: RequestRecord, path: str, body: bytes, fields: Mapping[str, Any], run: Run
    ) -> AbstractAsyncContextManager[Any]:
        """What runs a request for a model as an asynchronous context. That raises `RateLimitError` if the request has
        to come later, and `OverRateLimitError` if it asks for more tokens than there will ever be.

        `run` is as of `BodyBudget`: what takes long for a large body is done in a thread.
        """
        if not self.has_keys or record.identity is None:
            return _FREE
        size = len(body) if may_hold_media(body) else 0
        return MeteredCall(self, record, await run(record.tenant, size, demand_of, path, body, fields))


class MeteredCall:
    """One request as an asynchronous context. A class of its own, since it is entered by every request."""

    __slots__ = ("_demand", "_metering", "_record", "_settle")

    def __init__(self, metering: Metering, record: RequestRecord, demand: Demand) -> None:
        self._metering = metering
        self._record = record
        self._demand = demand
        self._settle: Settle | None = None

    async def __aenter__(self) -> None:
        limits, record = self._metering.limits, self._record
        assert record.identity is not None
        if not limits.has(record.identity.owner):
            return
        verdict, self._settle = await limits.admit(record.identity.owner, self._demand)
        record.limit_headers = _headers(record, verdict.standing)
        if verdict.refusal is not None:
            if self._metering.metrics is not None and isinstance(verdict.refusal, RateLimitError):
                self._metering.metrics.limited(record.tenant, verdict.refusal.limit)
            raise verdict.refusal

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        record, metering = self._record, self._metering
        assert record.identity is not None
        failed = record.failed or (error is not None and not _is_cancelled(error))
        unknown = 0 if failed or record.usage is not None else self._demand.untold(record.arrived)
        if self._settle is not None:
            self._settle(unknown + record.tokens)
        if metering.meter is not None:
            metering.meter.note(record.identity.owner, record, failed=failed, estimated=unknown)
        if metering.metrics is not None and record.usage is not None:
            counts = {"prompt": record.usage.prompt_tokens, "completion": record.usage.completion_tokens}
            metering.metrics.tenant_tokens(record.tenant, **counts)


def _is_cancelled(error: BaseException) -> bool:
    """Whether the client has gone: what was computed for it is not given back."""
    return isinstance(error, (asyncio.CancelledError, ClientDisconnect))


def _headers(record: RequestRecord, standing: Standing) -> tuple[tuple[bytes, bytes], ...]:
    return anthropic_headers(standing, time.time()) if record.anthropic else openai_headers(standing)
