from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache.storage.batch_writer import BatchWriter
from agentspec.errors import CacheError


class Disk:
    """Takes what it is given, or fails as it is told: with what is_transient (`OSError`), or with what does not."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.failure: Exception | None = None
        self.calls = 0
        self.go, self.called = threading.Event(), threading.Event()
        self.go.set()

    def commit(self, jobs: list[int]) -> int:
        self.called.set()
        self.go.wait()
        self.calls += 1
        if self.failure:
            raise self.failure
        self.written += jobs
        return 0

    def writer(self, room: int = 1000, linger: float = 0.0) -> BatchWriter[int]:
        is_transient = lambda error: isinstance(error, OSError)  # noqa: E731
        return BatchWriter(self.commit, name="test", is_transient=is_transient, room=room, linger=linger)


@given(room=st.integers(1, 8), count=st.integers(1, 20))
def test_the_oldest_make_room_and_are_counted(room: int, count: int) -> None:
    disk = Disk()
    disk.failure = OSError("disk is full")
    writer = disk.writer(room)
    for job in range(count):
        writer.put(job)
        with pytest.raises(CacheError, match="full"):
            writer.flush()
    disk.failure = None
    writer.close()
    kept = list(range(max(0, count - room), count))
    assert disk.written == kept
    assert writer.dropped == count - len(kept)


def test_what_waits_can_be_revised_but_not_what_is_being_committed() -> None:
    disk = Disk()
    disk.go.clear()
    writer = disk.writer()
    writer.put(1)
    disk.called.wait()
    for job in range(2, 10):
        writer.put(job)
    thread = threading.Thread(target=lambda: writer.revise(lambda jobs: [job for job in jobs if job % 2]))
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()
    disk.failure = OSError("disk is full")
    disk.go.set()
    thread.join()
    disk.failure = None
    writer.close()
    assert disk.written == [1, 3, 5, 7, 9]


@pytest.mark.parametrize(("failure", "error"), [(OSError("full"), None), (ValueError("gone"), "gone")])
def test_a_failure_that_passes_is_over_once_nothing_waits(failure: Exception, error: str | None) -> None:
    """Where what could not be written is not to be written any more, no later commit would end it."""
    disk = Disk()
    disk.failure = failure
    writer = disk.writer()
    writer.put(1)
    with pytest.raises(CacheError):
        writer.flush()
    writer.revise(lambda jobs: [])
    assert writer.error == error
    disk.failure = None
    writer.close()
    assert disk.written == []
