"""The threads in which torch computes: one for each device, because OpenMP keeps a pool of workers for every thread."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Protocol

import torch

from agentspec.errors import EngineStoppedError

QUIET_SECONDS = 0.02  # without work before idle workers get a turn: between two forwards of one answer is less


class Worker(Protocol):
    """Computes in turns, if it is `ready` or, while all others rest, if it has work to `spare`.

    `turn` must not raise and must not wait. `fail` says, in the computing thread, that the device failed: the worker
    has to fail its work and leave the thread.
    """

    @property
    def ready(self) -> bool: ...
    @property
    def spare(self) -> bool: ...
    def turn(self) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class ComputeThread:
    """One thread that gives its workers a turn each, and ends once it has no workers.

    Engines with a thread each would slow each other down (see `tasks.on_own_thread`). Spare work gets one turn at a
    time, and only while no worker has been ready for `QUIET_SECONDS`.
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


def stopped_by(cause: BaseException) -> EngineStoppedError:
    """The error of all requests once `cause` has shown that nothing can be computed any more."""
    return EngineStoppedError(f"the engine stopped: {type(cause).__name__}; the process must be restarted")


_threads: dict[str, ComputeThread] = {}
_lock = threading.Lock()


def compute_thread(device: torch.device) -> ComputeThread:
    """The thread in which all models on `device` compute: one for the CPU, one for each accelerator."""
    with _lock:
        return _threads.setdefault(str(device), ComputeThread(f"agentspec-{device}"))
