from __future__ import annotations

import logging
import threading

import pytest

from agentspec.cache.batch_writer import BatchWriter
from agentspec.errors import CacheError


def test_flush_waits_and_what_gathers_is_committed_together() -> None:
    batches: list[list[int]] = []
    done: list[int] = []
    go = threading.Event()

    def commit(jobs: list[int]) -> None:
        go.wait()
        batches.append(jobs)
        done.extend(jobs)

    writer = BatchWriter(commit, name="test")
    for job in range(10):
        writer.put(job)
    go.set()
    writer.flush()
    assert done == list(range(10))
    assert len(batches) <= 2
    writer.put(10)
    writer.close()
    assert batches[-1] == [10]
    writer.put(11)
    writer.close()
    assert done[-1] == 10


def test_a_failure_warns_once_and_ends_writing(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[list[int]] = []

    def commit(jobs: list[int]) -> None:
        calls.append(jobs)
        raise OSError("disk full")

    writer = BatchWriter(commit, name="test")
    with caplog.at_level(logging.WARNING):
        writer.put(1)
        with pytest.raises(CacheError, match="disk full"):
            writer.flush()
        writer.put(2)
        with pytest.raises(CacheError, match="disk full"):
            writer.flush()
        writer.close()
    assert calls == [[1]]
    assert writer.error == "disk full"
    assert len(caplog.records) == 1
