from __future__ import annotations

import logging
import threading

import pytest

from agentspec.cache.maintenance import Keeper


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
        keeper = Keeper(work, seconds=0.01, name="keeper")
        assert enough.wait(10)
        keeper.close()
        keeper.close()
    done = turns
    assert [record.getMessage() for record in caplog.records] == 2 * ["looking after the cache failed: disk is gone"]
    assert not any(thread.name == "keeper" for thread in threading.enumerate())
    assert turns == done
