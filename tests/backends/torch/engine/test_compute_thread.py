from __future__ import annotations

import gc
import threading
import time
import weakref

import torch

from agentspec.backends.torch.engine.compute_thread import ComputeThread, Tasks

WAIT = 10.0


class Counting:
    """A worker with so many turns of work, that leaves when told to or after its last turn."""

    def __init__(self, home: ComputeThread, name: str, log: list[str], turns: int) -> None:
        self.home, self.name, self.log, self.left = home, name, log, turns
        self.leaving, self.gone = False, threading.Event()
        self.threads: set[int] = set()

    @property
    def ready(self) -> bool:
        return self.left > 0 or self.leaving

    def turn(self) -> None:
        assert torch.is_inference_mode_enabled() and self.home.current
        self.threads.add(threading.get_ident())
        if self.leaving:
            self.home.remove(self)
            self.gone.set()
        else:
            self.left -= 1
            self.log.append(self.name)

    def leave(self) -> None:
        self.leaving = True
        self.home.wake()
        assert self.gone.wait(WAIT)


def test_an_idle_worker_computes_while_no_other_is_ready_and_keeps_no_thread_alive() -> None:
    home, log = ComputeThread("test-idle"), list[str]()
    idle, worker = Counting(home, "idle", log, 3), Counting(home, "work", log, 0)
    home.add_idle(idle)
    worker.left = 2
    home.add(worker)
    deadline = time.monotonic() + WAIT
    while len(log) < 5 and time.monotonic() < deadline:
        time.sleep(0.002)
    assert log == ["work", "work", "idle", "idle", "idle"]
    worker.leave()
    wait_until_over("test-idle")
    idle.left = 1
    home.remove(idle)
    assert not home._idle


def wait_until_over(name: str) -> None:
    deadline = time.monotonic() + WAIT
    while any(thread.name == name for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread never ended"
        time.sleep(0.002)


class Held:
    """Something that a failing call uses."""


def test_a_failed_call_keeps_nothing_alive() -> None:
    """Without waiting for the garbage collector, since KV slots may be among it."""
    tasks, released = Tasks(ComputeThread("failing")), threading.Event()

    def failing() -> None:
        held = Held()
        weakref.finalize(held, released.set)
        raise ValueError(f"with {type(held).__name__} in its frame")

    gc.disable()
    try:
        future = tasks.submit(failing)
        assert isinstance(future.exception(WAIT), ValueError)
        del future
        assert released.wait(WAIT)
    finally:
        gc.enable()
        tasks.close()
