"""Where torch computes: OpenMP keeps a pool of workers for every thread that computes, until that thread ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from agentspec.errors import ShuttingDownError

T = TypeVar("T")


def on_own_thread(function: Callable[[], T]) -> T:
    """Run `function` on a thread that ends with it, and return or raise what it does.

    The workers of that thread's pool end too. Workers of two pools on the same cores make libgomp put idle workers to
    sleep at once, and every forward of the engine then waits for hundreds of wake-ups: a third slower on two cores.
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
    """Something that computes in turns. `turn` must not raise and must not wait."""

    @property
    def ready(self) -> bool:
        """Whether there is something to do."""
        ...

    def turn(self) -> None: ...


class ComputeThread:
    """One thread in which several workers compute, a turn each, as long as there are any.

    Engines in one process would otherwise slow each other down (see `on_own_thread`).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._workers: list[Worker] = []
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
        """It gets no more turns; the thread ends with the last one."""
        with self._changed:
            self._workers.remove(worker)
            self._changed.notify()

    def wake(self) -> None:
        """A worker has become ready."""
        with self._changed:
            self._changed.notify()

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
        """Wait for workers with something to do; none once there are no workers at all."""
        with self._changed:
            while self._workers:
                if ready := [worker for worker in self._workers if worker.ready]:
                    return ready
                self._changed.wait()
            self._thread = None
            return []


class Tasks:
    """Calls from any thread, made in a computing thread one a turn, in order, between the turns of its engines."""

    def __init__(
        self,
        thread: ComputeThread,
        refused: str = "the engine is shutting down",
        dropped: str = "the engine was shut down",
    ) -> None:
        self._thread, self._refused, self._dropped = thread, refused, dropped
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = threading.Lock()
        self._added = self._closed = False

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """What `function` returns or raises. Cancelling the future works until its turn has come.

        Raises `ShuttingDownError` with the message `refused` after `close`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise ShuttingDownError(self._refused)
            self._calls.append((future, function))
            if not self._added:
                self._added = True
                self._thread.add(self)
        self._thread.wake()
        return future

    def close(self) -> None:
        """Fail what waits with `ShuttingDownError` and the message `dropped`. Idempotent."""
        with self._lock:
            if self._added and not self._closed:
                self._thread.remove(self)
            self._closed = True
            waiting, self._calls = self._calls, deque()
        for future, _ in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(ShuttingDownError(self._dropped))

    @property
    def ready(self) -> bool:
        return bool(self._calls)

    def turn(self) -> None:
        """One call. Called by the computing thread alone."""
        try:
            future, function = self._calls.popleft()
        except IndexError:  # closed meanwhile
            return
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)


_threads: dict[str, ComputeThread] = {}
_lock = threading.Lock()


def compute_thread(device: torch.device) -> ComputeThread:
    """The thread that all models on `device` compute in: one for the processor, one for each accelerator."""
    with _lock:
        return _threads.setdefault(str(device), ComputeThread(f"agentspec-{device}"))
