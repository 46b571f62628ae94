"""Calls in process that are tried again while nothing of an answer has come."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio

from agentspec.backends.pool.pool import retry_after
from agentspec.errors import (
    NoServerError,
    OverloadedError,
    UpstreamError,
    UpstreamStatusError,
    UpstreamTimeoutError,
)
from agentspec.runtime.runtime import Runtime
from agentspec.types import Delta, GenerateRequest

_RETRIED = (429, 502, 503, 504)


async def attempts(runtime: Runtime, call: GenerateRequest, max_retries: int) -> AsyncGenerator[Delta]:
    """Run `call`, with at most `max_retries` retries while no delta has arrived and the error is temporary."""
    for attempt in range(max_retries + 1):
        begun = False
        try:
            async with aclosing(runtime.generate(call)) as deltas:
                async for delta in deltas:
                    begun = True
                    yield delta
            return
        except (OverloadedError, UpstreamError) as error:
            if begun or attempt == max_retries or not _temporary(error):
                raise
            delay = delay_before(error, attempt)
        await anyio.sleep(delay)


def delay_before(error: OverloadedError | UpstreamError, attempt: int) -> float:
    """Seconds before the next attempt: what the server or the pool asks for, else doubled each time; at most 30."""
    asked = error.retry_after if isinstance(error, OverloadedError | NoServerError) else None
    if isinstance(error, UpstreamStatusError):
        asked = retry_after(error.headers)
    return min(0.5 * 2**attempt if asked is None else asked, 30.0)


def _temporary(error: OverloadedError | UpstreamError) -> bool:
    if isinstance(error, UpstreamStatusError):
        return error.status in _RETRIED
    return not isinstance(error, UpstreamTimeoutError)  # a timeout has already used up the time limit
