"""The threads in which torch computes: one for each device, because OpenMP keeps a pool of workers for every thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch

from agentspec.backends.torch.model.device import is_device_error
from agentspec.errors import AgentSpecError, EngineStoppedError, ShuttingDownError

T = TypeVar("T")

QUIET_SECONDS = 0.02  # without work before idle workers get a turn: between two forwards of one answer is less


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


class Worker(Protocol):
    """An object that computes in turns. `turn` must not raise and must not wait.

    `fail` says, in the computing thread, that the device failed: the worker has to fail its work and leave the thread.
    """

    @property
    def ready(self) -> bool:
        """Whether the worker has something to compute."""
        ...

    @property
    def spare(self) -> bool:
        """Whether the worker has something to compute while all others rest."""
        ...

    def turn(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class ComputeThread:
    """One thread that gives its workers a turn each, and ends once it has no workers.

    Engines with a thread each would slow each other down (see `on_own_thread`). Spare work gets one turn at a time, and
    only while no worker has been ready for `QUIET_SECONDS`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._workers: list[Worker] = []
        self._busy = False  # whether a worker that was ready had the last turn
        self._worked = 0.0  # when the last of these turns ended, by `perf_counter`
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, worker: Worker) -> None:
        with self._changed:
            self._workers.append(worker)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, worker: Worker) -> None:
        """Give `worker` no more turns. The thread ends when the last worker is removed."""
        with self._changed:
            self._workers.remove(worker)
            self._changed.notify()

    def wake(self) -> None:
        """Tell the thread that a worker has become ready."""
        with self._changed:
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """Tell all workers that the device failed, as `error` shows. Only the computing thread may call this."""
        with self._changed:
            workers = list(self._workers)
        for worker in workers:
            worker.fail(error)

    @property
    def current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        with torch.inference_mode():
            while workers := self._ready():
                for worker in workers:
                    worker.turn()

    def _ready(self) -> list[Worker]:
        """Wait until workers are ready and return them; return an empty list once all workers were removed."""
        with self._changed:
            while self._workers:
                if ready := [worker for worker in self._workers if worker.ready]:
                    self._busy = True
                    return ready
                if self._busy:
                    self._busy, self._worked = False, perf_counter()
                spare = next((worker for worker in self._workers if worker.spare), None)
                left = self._worked + QUIET_SECONDS - perf_counter()
                if spare is not None and left <= 0:
                    return [spare]
                self._changed.wait(None if spare is None else left)
            self._thread = None
            return []


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


def stopped_by(cause: BaseException) -> EngineStoppedError:
    """The error of all requests once `cause` has shown that nothing can be computed any more."""
    return EngineStoppedError(f"the engine stopped: {type(cause).__name__}; the process must be restarted")


_threads: dict[str, ComputeThread] = {}
_lock = threading.Lock()


def compute_thread(device: torch.device) -> ComputeThread:
    """The thread in which all models on `device` compute: one for the CPU, one for each accelerator."""
    with _lock:
        return _threads.setdefault(str(device), ComputeThread(f"agentspec-{device}"))
