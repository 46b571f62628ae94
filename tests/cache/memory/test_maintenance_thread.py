from __future__ import annotations

import logging
import threading

import pytest

from agentspec.cache.memory.maintenance_thread import MaintenanceThread


def test_it_works_until_it_is_closed_and_tells_a_failure_once(caplog: pytest.LogCaptureFixture) -> None:
    turns, enough = 0, threading.Event()

    def work() -> None:
        nonlocal turns
        turns += 1
        if turns >= 6:
            enough.set()
        if turns != 3:
            raise OSError("disk is gone")

    with caplog.at_level(logging.WARNING):
        thread = MaintenanceThread(work, seconds=0.01, name="thread")
        assert enough.wait(10)
        thread.close()
        thread.close()
    done = turns
    assert [record.getMessage() for record in caplog.records] == 2 * ["looking after the cache failed: disk is gone"]
    assert not any(one.name == "thread" for one in threading.enumerate())
    assert turns == done


def test_it_does_what_is_urgent_when_it_is_woken() -> None:
    done, urgent = [], threading.Event()
    thread = MaintenanceThread(lambda: done.append("work"), seconds=3600, name="thread", urgent=urgent.set)
    thread.wake()
    assert urgent.wait(10)
    thread.close()
    assert done == []
