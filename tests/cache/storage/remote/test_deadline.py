"""A remote that hangs: each call ends by its deadline, and what has nothing to do with segments goes on."""

from __future__ import annotations

import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from agentspec.cache import SuffixCache, sync
from agentspec.cache.storage.remote import deadline
from agentspec.cache.storage.remote.deadline import BoundedObjects
from agentspec.cache.storage.remote.objects import FolderObjects


class HangingFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system in memory, one of whose methods, or all, do not return while it hangs."""

    protocol = "hanging"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    answers = threading.Event()
    hanging: tuple[str, ...] = ()
    waiting = 0

    def _wait(self, method: str) -> None:
        if method in self.hanging:
            type(self).waiting += 1
            self.answers.wait()
            type(self).waiting -= 1

    def find(self, *arguments: Any, **options: Any) -> Any:
        self._wait("find")
        return super().find(*arguments, **options)

    def cat_file(self, *arguments: Any, **options: Any) -> Any:
        self._wait("cat_file")
        return super().cat_file(*arguments, **options)

    def put_file(self, *arguments: Any, **options: Any) -> Any:
        self._wait("put_file")
        return super().put_file(*arguments, **options)

    def rm_file(self, *arguments: Any, **options: Any) -> Any:
        self._wait("rm_file")
        return super().rm_file(*arguments, **options)


register_implementation("hanging", HangingFileSystem, clobber=True)
ALL = ("find", "cat_file", "put_file", "rm_file")


@pytest.fixture
def hang() -> Iterator[Callable[..., None]]:
    """Lets methods hang from now on; none, and those that hang return."""

    def choose(*methods: str) -> None:
        HangingFileSystem.hanging = methods
        if methods:
            HangingFileSystem.answers.clear()
        else:
            HangingFileSystem.answers.set()

    yield choose
    choose()


@pytest.fixture
def remote() -> str:
    return f"hanging://{uuid.uuid4().hex}"


def wait(condition: Callable[[], object], seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def record(cache: SuffixCache, output: list[int]) -> None:
    with cache.request([1]) as request:
        request.extend(output)
    cache.flush()


def test_a_hung_call_ends_and_the_next_ones_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "ANSWER", 0.05)
    released, asked = threading.Event(), 0

    class Hanging(FolderObjects):
        def names(self) -> list[str]:
            nonlocal asked
            asked += 1
            released.wait()
            return super().names()

    objects = BoundedObjects(Hanging(tmp_path))
    for _ in range(3):
        with pytest.raises(TimeoutError, match="answer"):
            objects.names()
    assert (asked, objects.late) == (1, 0)
    monkeypatch.setattr(objects, "_again", 0.0)
    with pytest.raises(TimeoutError, match="no answer within"):
        objects.names()
    released.set()
    wait(lambda: objects.late == 2)
    assert objects.names() == [] and asked == 3


def test_a_place_is_asked_again_however_many_calls_never_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "ANSWER", 0.01)
    released, rests = threading.Event(), []

    class Hanging(FolderObjects):
        def read(self, name: str, size: int | None = None) -> bytes:
            released.wait()
            return b""

    objects = BoundedObjects(Hanging(tmp_path))
    for _ in range(9):
        with pytest.raises(TimeoutError, match="no answer within"):
            objects.read("a")
        rests.append(round(objects._again - time.monotonic()))
        with pytest.raises(TimeoutError, match="asked again later"):
            objects.names()
        monkeypatch.setattr(objects, "_again", 0.0)
    monkeypatch.setattr(deadline, "ANSWER", 30.0)
    assert objects.names() == [] and rests == sorted(rests) and rests[-1] == deadline._LONGEST_REST
    released.set()
    wait(lambda: objects.late == 9)


def test_what_comes_too_late_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "ANSWER", 0.05)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    released = threading.Event()

    class Slow(FolderObjects):
        def fetch(self, name: str, path: Path, size: int = 0) -> None:
            released.wait()
            path.parent.mkdir(parents=True, exist_ok=True)  # as fsspec's file systems do
            path.write_bytes(b"text")

    objects = BoundedObjects(Slow(tmp_path))
    with pytest.raises(TimeoutError), tempfile.TemporaryDirectory() as folder:
        objects.fetch("a", Path(folder) / "segment")
    released.set()
    wait(lambda: objects.late)
    assert not list((tmp_path / "temporary").iterdir())


def test_a_call_that_gets_no_thread_is_an_error_of_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="interpreter shutdown"):
        BoundedObjects(FolderObjects(tmp_path)).names()


def test_errors_of_a_place_are_its_own(tmp_path: Path) -> None:
    class Failing(FolderObjects):
        def read(self, name: str, size: int | None = None) -> bytes:
            raise TimeoutError("the place itself said so")

    objects = BoundedObjects(Failing(tmp_path))
    with pytest.raises(TimeoutError, match="itself said so"):
        objects.read("a")
    with pytest.raises(FileNotFoundError):
        objects.fetch("a", tmp_path / "b")
    (tmp_path / "b").write_bytes(b"text")
    objects.send(tmp_path / "b", "c")
    assert sorted(objects.names()) == ["b", "c"]
    objects.delete("b")
    assert objects.names() == ["c"] and objects.late == 0


def test_others_are_followed_while_a_segment_hangs_on_its_way(
    postgres: str, remote: str, hang: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_GROWN", 1)
    with SuffixCache.open(postgres, remote=remote) as writer, SuffixCache.open(postgres) as other:
        hang("put_file")
        record(writer, list(range(50)))
        wait(lambda: HangingFileSystem.waiting)
        for number in range(3):
            record(other, list(range(number, number + 20)))
        wait(lambda: writer.stats().sequences == 4)
        assert writer.forget(older_than=0) == 4
        assert HangingFileSystem.waiting == 1
        hang()
        wait(lambda: not HangingFileSystem.waiting)
    assert not [name for name in HangingFileSystem.store if remote[10:] in name], "what was forgotten is published"


def test_retention_election_and_closing_go_on_beside_a_remote_that_hangs(
    postgres: str, remote: str, hang: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "ANSWER", 0.1)
    monkeypatch.setattr(sync, "_GROWN", 1)
    writer = SuffixCache.open(postgres, remote=remote)
    record(writer, list(range(50)))
    wait(lambda: [name for name in HangingFileSystem.store if name.endswith(".json") and remote[10:] in name])
    hang(*ALL)
    with SuffixCache.open(postgres, remote=remote, retention=0.01) as next_writer:
        assert next_writer.stats().mode == "follower"
        record(writer, list(range(20)))
        writer.close()
        wait(lambda: next_writer.stats().mode == "writer")
        wait(lambda: next_writer.stats().sequences == 0)
        record(next_writer, [7, 8, 9])
        wait(lambda: next_writer.stats().sequences == 0)
        assert "answer" in str(next_writer.stats().segment_error)
        hang()
        wait(lambda: not HangingFileSystem.waiting)
        wait(lambda: not [name for name in HangingFileSystem.store if remote[10:] in name])
