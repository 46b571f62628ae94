"""Tools that were started early: in a thread of their own, or in a task of the running loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from agentspec.tools.history import ToolCall

_log = logging.getLogger(__name__)
_reported: set[tuple[str, type[Exception]]] = set()

Outcome = Literal["start", "hit", "waste", "stale", "failed"]


@dataclass(frozen=True, slots=True)
class ToolEvent:
    """One early start, `start`, or how it ended.

    `hit`: its result was used. `waste`: no call came for it. `stale`: another call may have changed something since,
    or it was too old. `failed`: the tool raised; it ran again. `seconds` is what a hit saved, or how long any other
    ran. Arguments and results are not in it.
    """

    outcome: Outcome
    tool: str
    tenant: str
    agent: str
    session: str
    seconds: float


class CallFailedError(Exception):
    """The tool raised, or was cancelled; nothing of it is to be shown."""


@dataclass(frozen=True, slots=True)
class EarlyStart:
    """A call that is started early, in the epoch that its session had. `ended` is called at its end."""

    call: ToolCall
    key: str
    epoch: int
    ended: Callable[[], None]


class SpeculativeCall(ABC):
    """A call that was started early. `started_at` is monotonic, in seconds."""

    def __init__(self, start: EarlyStart) -> None:
        self.start = start
        self.started_at = time.monotonic()
        self._finished_at: float | None = None

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return (self._finished_at or time.monotonic()) - self.started_at

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether it is known by now that there will be no result."""

    @abstractmethod
    def cancel(self) -> None:
        """Drop the result. A thread runs to its end."""

    @abstractmethod
    def wait(self) -> Any:
        """The result. Raises `CallFailedError`, also for a task, which only `arrive` can wait for."""

    @abstractmethod
    async def arrive(self) -> Any:
        """The result. Raises `CallFailedError`."""


class ThreadCall(SpeculativeCall):
    """Runs `invoke` in a daemon thread, in a copy of the caller's context."""

    def __init__(self, start: EarlyStart, invoke: Callable[[ToolCall], Any]) -> None:
        super().__init__(start)
        self._future = Future[Any]()
        self._future.set_running_or_notify_cancel()  # so that one who stops waiting does not cancel it
        self._dropped = False
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(self._run, invoke), name="agentspec-tool", daemon=True).start()

    @property
    def failed(self) -> bool:
        return self._dropped or (self._future.done() and self._future.exception() is not None)

    def cancel(self) -> None:
        self._dropped = True

    def wait(self) -> Any:
        self._future.exception()
        return self._outcome()

    async def arrive(self) -> Any:
        with contextlib.suppress(CallFailedError):
            await asyncio.wrap_future(self._future)
        return self._outcome()

    def _outcome(self) -> Any:
        if self.failed:
            raise CallFailedError
        return self._future.result()

    def _run(self, invoke: Callable[[ToolCall], Any]) -> None:
        result, error = None, None
        try:
            result = invoke(self.start.call)
        except BaseException as raised:
            error = raised
        self._finished_at = time.monotonic()
        self.start.ended()
        if error is not None or self._dropped:
            self._future.set_exception(CallFailedError())
        else:
            self._future.set_result(result)


class TaskCall(SpeculativeCall):
    """Runs the coroutine of `invoke` as a task of the running loop, whose end cancels it."""

    def __init__(self, start: EarlyStart, invoke: Callable[[ToolCall], Awaitable[Any]]) -> None:
        super().__init__(start)
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(invoke))
        self._task.add_done_callback(self._end)

    @property
    def failed(self) -> bool:
        return self._task.done() and (self._task.cancelled() or self._task.exception() is not None)

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._task.cancel)

    def wait(self) -> Any:
        raise CallFailedError

    async def arrive(self) -> Any:
        if not self._task.done():
            if asyncio.get_running_loop() is not self._loop:
                raise CallFailedError
            await asyncio.wait({self._task})
        if self.failed:
            raise CallFailedError
        return self._task.result()

    async def _run(self, invoke: Callable[[ToolCall], Awaitable[Any]]) -> Any:
        return await invoke(self.start.call)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._finished_at = time.monotonic()
        self.start.ended()
        if not task.cancelled():
            task.exception()  # or asyncio would log it


@contextmanager
def kept_from_agent(doing: str) -> Iterator[None]:
    """What fails inside ends there: the agent goes on. The first failure of a kind is logged with its traceback."""
    try:
        yield
    except Exception as error:
        if (doing, type(error)) not in _reported:
            _reported.add((doing, type(error)))
            _log.exception("%s failed; the agent goes on without it", doing)
