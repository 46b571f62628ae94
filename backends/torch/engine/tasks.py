"""Calls that run in a computing thread between the engines' steps, and a thread of its own for loading a model."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from agentspec.backends.torch.engine.compute_thread import ComputeThread, stopped_by
from agentspec.backends.torch.model.device import is_device_error
from agentspec.errors import AgentSpecError, EngineError, ShuttingDownError
from agentspec.telemetry.safe_errors import error_location

logger = logging.getLogger(__name__)

T = TypeVar("T")


def on_own_thread(function: Callable[[], T]) -> T:
    """Run `function` on a thread of its own, which then ends, and return its result or raise its exception.

    The thread's OpenMP workers end with it. If two pools shared the same cores, libgomp would put idle workers to sleep
    at once, and every forward of the engine would wait for hundreds of wake-ups: a third slower on two cores.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="agentspec-load")
    thread.start()
    thread.join()
    return outcome.result()


class Tasks:
    """Runs calls submitted by any thread in a computing thread: in order, one a turn, between its engines' turns.

    `device_failed` gets an error that shows that the device failed (default: all workers of the thread fail).
    """

    def __init__(self, thread: ComputeThread, device_failed: Callable[[BaseException], None] | None = None) -> None:
        self._thread = thread
        self._device_failed = device_failed or thread.fail
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()
        self._added = self._closed = False

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue `function`; the future gets its result or exception, and can be cancelled until the call starts.

        Raises `ShuttingDownError` after `close`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise ShuttingDownError("the model is shutting down")
            self._calls.append((future, function))
            if not self._added:
                self._added = True
                self._thread.add(self)
        self._thread.wake()
        return future

    def close(self) -> None:
        """Fail all waiting calls with `ShuttingDownError`. Idempotent."""
        self._close(ShuttingDownError("the model was shut down"))

    def fail(self, error: BaseException) -> None:
        """Fail all waiting calls because the device failed, and refuse further ones."""
        self._close(stopped_by(error))

    def _close(self, error: AgentSpecError) -> None:
        with self._lock:
            if self._added and not self._closed:
                self._thread.remove(self)
            self._closed = True
            waiting, self._calls = self._calls, deque()
        for future, _ in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    spare = False

    @property
    def ready(self) -> bool:
        return bool(self._calls)

    def turn(self) -> None:
        """Run the next call. Only the computing thread may call this."""
        try:
            future, function = self._calls.popleft()
        except IndexError:  # `close` has emptied the queue meanwhile
            return
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
            if is_device_error(error):
                self._device_failed(error)
        finally:
            # The error's traceback keeps this frame: with these it would keep itself, and what the call holds.
            del future, function


async def computed(tasks: Tasks, function: Callable[[], T]) -> T:
    """Run `function` in the computing thread and return its result. Raises its `AgentSpecError`s as they are, and
    `EngineError` for any other exception.
    """
    try:
        return await asyncio.wrap_future(tasks.submit(function))
    except AgentSpecError:
        raise
    except Exception as error:
        logger.error("the engine failed on a step: %s", error_location(error))
        raise EngineError("the engine failed on this request") from error
