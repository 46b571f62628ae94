"""Building the backends while the server already answers /health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from agentspec.errors import ShuttingDownError
from agentspec.proxy.logs import logger
from agentspec.runtime import Runtime


class Loading:
    """Starts a runtime in a thread for as long as the application lives. `error` is what the start failed with."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.error: Exception | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Begin to load, and at the end close the runtime, which flushes the cache."""
        task = asyncio.create_task(self._load())
        try:
            yield
        finally:
            await self._runtime.aclose()
            await task

    async def _load(self) -> None:
        try:
            await anyio.to_thread.run_sync(self._runtime.start)
            logger.info("ready", models=self._runtime.models())
        except ShuttingDownError:
            logger.info("stopped while loading")
        except Exception as error:
            self.error = error
            logger.error("loading failed", exception=type(error).__name__)
