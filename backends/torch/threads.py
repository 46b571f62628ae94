"""Where torch computes: OpenMP keeps a pool of workers for every thread that computes, until that thread ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
