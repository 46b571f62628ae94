"""Loads the models in a thread while the gateway answers already, and closes the runtime at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio

from agentspec.errors import ShuttingDownError
from agentspec.proxy.logs import logger
from agentspec.runtime import Runtime


class Loading:
    """Starts a runtime in a thread for the lifespan of the application. `error` is the exception of a failed start.

    Loading cannot be interrupted. If the process ends with the application, call `abort()` before: the lifespan then
    does not wait for a model that is still loading, and sets `left_behind`, since the loading thread still runs.
    `when_ready` is called on the loop once everything is loaded.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._aborted = False
        self.error: Exception | None = None
        self.left_behind = False
        self.when_ready: Callable[[], None] = lambda: None

    @property
    def failure(self) -> Exception | None:
        """Why the process must be started again: the error of a failed start, or of a backend that failed for good."""
        return self.error or self._runtime.failure

    def abort(self) -> None:
        self._aborted = True

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Begin to load. At the end, close the runtime, which flushes the cache."""
        task = asyncio.create_task(self._load())
        try:
            yield
        finally:
            if self._aborted and not task.done():
                self.left_behind = True
                task.cancel()
                logger.info("stopped while loading")
            else:
                await self._runtime.aclose()
            with suppress(asyncio.CancelledError):
                await task

    async def _load(self) -> None:
        try:
            await anyio.to_thread.run_sync(self._runtime.start, abandon_on_cancel=True)
            if self._runtime.fleet is not None:
                await self._runtime.fleet.begin()
            self.when_ready()
            logger.info("ready", models=self._runtime.models())
        except ShuttingDownError:
            logger.info("stopped while loading")
        except Exception as error:
            self.error = error
            logger.error("loading failed", exception=type(error).__name__)
