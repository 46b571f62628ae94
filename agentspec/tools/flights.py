"""Tools that were started early: in a thread of their own, or in a task of the running loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agentspec.tools.prediction.history import ToolCall


class FlightFailedError(Exception):
    """The tool raised, or was cancelled; nothing of it is to be shown."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A call that is started early, in the epoch that its session had. `ended` is called at its end.

    `named`: the model had written the name of a tool by then.
    """

    call: ToolCall
    key: str
    epoch: int
    probability: float
    ended: Callable[[], None]
    named: bool = False


class Flight(ABC):
    """A call that was started early. `launched_at` is monotonic, in seconds."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.launched_at = time.monotonic()
        self._finished_at: float | None = None

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return (self._finished_at or time.monotonic()) - self.launched_at

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether it is known by now that there will be no result."""

    @abstractmethod
    def cancel(self) -> None:
        """Nobody wants the result any more. A thread runs to its end, and its result is dropped."""

    @abstractmethod
    def wait(self) -> Any:
        """The result. Raises `FlightFailedError`, also for a task, which only `arrive` can wait for."""

    @abstractmethod
    async def arrive(self) -> Any:
        """The result. Raises `FlightFailedError`."""


class ThreadFlight(Flight):
    """Runs `invoke` in a daemon thread, in a copy of the caller's context."""

    def __init__(self, launch: Launch, invoke: Callable[[ToolCall], Any]) -> None:
        super().__init__(launch)
        self._invoke = invoke
        self._done = threading.Event()
        self._result: Any = None
        self._failed = False
        self._watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._lock = threading.Lock()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._run,), name="agentspec-tool", daemon=True).start()

    @property
    def failed(self) -> bool:
        return self._failed

    def cancel(self) -> None:
        self._failed, self._result = True, None

    def wait(self) -> Any:
        self._done.wait()
        return self._outcome()

    async def arrive(self) -> Any:
        event = asyncio.Event()
        with self._lock:
            if not self._done.is_set():
                self._watchers.append((asyncio.get_running_loop(), event))
            else:
                event.set()
        await event.wait()
        return self._outcome()

    def _outcome(self) -> Any:
        if self._failed:
            raise FlightFailedError
        return self._result

    def _run(self) -> None:
        try:
            result = self._invoke(self.launch.call)
            if not self._failed:
                self._result = result
        except BaseException:
            self._failed = True
        finally:
            self._finished_at = time.monotonic()
            self.launch.ended()
            self._wake()

    def _wake(self) -> None:
        with self._lock:
            self._done.set()
            watchers, self._watchers = self._watchers, []
        for loop, event in watchers:
            with contextlib.suppress(RuntimeError):  # that loop has ended
                loop.call_soon_threadsafe(event.set)


class TaskFlight(Flight):
    """Runs the coroutine of `invoke` as a task of the running loop, which may end before the task does."""

    def __init__(self, launch: Launch, invoke: Callable[[ToolCall], Awaitable[Any]]) -> None:
        super().__init__(launch)
        self._loop = asyncio.get_running_loop()
        self._counts = threading.Lock()  # taken by whoever says that it has ended
        self._task = self._loop.create_task(self._run(invoke))
        with contextlib.suppress(AttributeError):  # a loop that is closed before its end is to say nothing of it
            setattr(self._task, "_log_destroy_pending", False)  # noqa: B010  # what asyncio sets for tasks of its own
        self._task.add_done_callback(self._end)

    @property
    def failed(self) -> bool:
        if self._task.done():
            return self._task.cancelled() or self._task.exception() is not None
        return self._loop.is_closed()

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        if not self._loop.is_running():  # and may never run again
            self._give_back()

    def wait(self) -> Any:
        raise FlightFailedError

    async def arrive(self) -> Any:
        if not self._task.done():
            if asyncio.get_running_loop() is not self._loop:
                raise FlightFailedError
            await asyncio.wait({self._task})
        if self.failed:
            raise FlightFailedError
        return self._task.result()

    async def _run(self, invoke: Callable[[ToolCall], Awaitable[Any]]) -> Any:
        return await invoke(self.launch.call)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._finished_at = time.monotonic()
        self._give_back()
        if not task.cancelled():
            task.exception()  # it is nobody's business any more

    def _give_back(self) -> None:
        if self._counts.acquire(blocking=False):
            self.launch.ended()
