"""Tools that were started early: each runs in a thread of its own, or as a task of the running loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from agentspec.telemetry import tracing
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
    """The tool raised, or was cancelled; no result may be shown."""


class SpeculativeCall:
    """A call that was started early, in the `epoch` that its session had then.

    It runs `invoke` in a daemon thread, in a copy of the caller's context. With `as_task` the coroutine of `invoke`
    runs as a task of the running loop: only that loop can wait for it, and its end cancels it. `ended` is called when
    the tool ends. `started_at` is monotonic, in seconds.
    """

    def __init__(
        self,
        call: ToolCall,
        key: str,
        epoch: int,
        ended: Callable[[], None],
        invoke: Callable[[ToolCall], Any],
        *,
        as_task: bool,
    ) -> None:
        self.call, self.key, self.epoch = call, key, epoch
        named = {"gen_ai.tool.name": call.name, "gen_ai.tool.type": "function", "agentspec.tool.started_early": True}
        self._span = tracing.start("execute_tool", call.name, named)
        self.started_at = time.monotonic()
        self._finished_at: float | None = None
        self._ended = ended
        self._dropped = False
        self._result = Future[Any]()
        self._result.set_running_or_notify_cancel()  # so that a waiter that is cancelled does not cancel it
        self._task: asyncio.Task[Any] | None = None
        with tracing.within(self._span):
            run = contextvars.copy_context().run
        if as_task:
            self._task = run(asyncio.get_running_loop().create_task, invoke(call))
            self._task.add_done_callback(self._end_task)
        else:
            threading.Thread(target=run, args=(self._run, invoke), name="agentspec-tool", daemon=True).start()

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return (self._finished_at or time.monotonic()) - self.started_at

    @property
    def failed(self) -> bool:
        """Whether it is known by now that there will be no result."""
        return self._dropped or (self._result.done() and self._result.exception() is not None)

    def end_span(self, outcome: Outcome) -> None:
        """Say in its span what became of it."""
        if self._span is not None:
            self._span.set({"agentspec.tool.outcome": outcome, "agentspec.tool.seconds": self.seconds})
            self._span.end("tool_error" if outcome == "failed" else None)

    def cancel(self) -> None:
        """Drop the result. A thread runs to its end."""
        self._dropped = True
        if self._task is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def wait(self) -> Any:
        """The result. Raises `CallFailedError`, also for a task, which only `arrive` can wait for."""
        if self._task is not None:
            raise CallFailedError
        return self._result.result()

    async def arrive(self) -> Any:
        """The result. Raises `CallFailedError`, also for an unfinished task of another loop."""
        task = self._task
        if task is not None and not task.done() and task.get_loop() is not asyncio.get_running_loop():
            raise CallFailedError
        return await asyncio.wrap_future(self._result)

    def _run(self, invoke: Callable[[ToolCall], Any]) -> None:
        try:
            result = invoke(self.call)
        except BaseException:
            self._end(failed=True)
        else:
            self._end(result)

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._end(failed=True)
        else:
            self._end(task.result())

    def _end(self, result: Any = None, *, failed: bool = False) -> None:
        self._finished_at = time.monotonic()
        self._ended()
        if failed or self._dropped:
            self._result.set_exception(CallFailedError())
        else:
            self._result.set_result(result)


@contextmanager
def contained(doing: str) -> Iterator[None]:
    """An error inside ends there, and the agent goes on. The first one of a kind is logged with its traceback."""
    try:
        yield
    except Exception as error:
        if (doing, type(error)) not in _reported:
            _reported.add((doing, type(error)))
            _log.exception("%s failed; the agent goes on without it", doing)
