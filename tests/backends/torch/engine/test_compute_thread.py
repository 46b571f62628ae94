from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from agentspec.backends.torch.engine.compute_thread import ComputeThread, Tasks, compute_thread, on_own_thread

WAIT = 10.0


def test_the_result_comes_back_and_the_thread_is_gone() -> None:
    thread = on_own_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_what_it_raises_is_raised_here() -> None:
    with pytest.raises(KeyError, match="lost"):
        on_own_thread(lambda: {}["lost"])


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


def test_workers_take_turns_in_one_thread_that_ends_with_the_last_of_them() -> None:
    home, log = ComputeThread("turns"), list[str]()
    one, two = Counting(home, "a", log, 0), Counting(home, "b", log, 0)
    home.add(one)
    home.add(two)
    with home._changed:  # both are ready before either begins
        one.left = two.left = 3
    home.wake()
    deadline = time.monotonic() + WAIT
    while len(log) < 6:
        assert time.monotonic() < deadline
    assert sorted(log) == ["a"] * 3 + ["b"] * 3 and log[:2] in (["a", "b"], ["b", "a"])
    one.leave()
    two.left = 1
    home.wake()
    two.leave()
    assert one.threads == two.threads and not home.current
    wait_until_over("turns")
    three = Counting(home, "c", log, 1)
    home.add(three)
    three.leave()
    wait_until_over("turns")


def test_models_on_one_device_share_a_thread() -> None:
    assert compute_thread(torch.device("cpu")) is compute_thread(torch.device("cpu"))
    assert compute_thread(torch.device("cpu")) is not compute_thread(torch.device("meta"))


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
