from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from agentspec.cache.deletion import select
from agentspec.cache.index import SuffixIndex
from agentspec.cache.storage.segments import Coverage, LocalFiles, SegmentFolder, segment_of
from agentspec.cache.tokens import SequenceMeta
from agentspec.errors import CacheError
from agentspec.types import Namespace

SPACE, OTHER = Namespace("a", "m", "k"), Namespace("b", "m", "k")


class FailingFiles(LocalFiles):
    """Fails at the n-th operation that may."""

    def __init__(self, path: Path, *, fail_at: int) -> None:
        super().__init__(path)
        self.left = fail_at

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(28, "No space left on device")

    def names(self) -> list[str]:
        self._count()
        return super().names()

    def size(self, name: str) -> int:
        self._count()
        return super().size(name)

    def open(self, name: str) -> BinaryIO:
        self._count()
        return super().open(name)

    def create(self, name: str) -> BinaryIO:
        self._count()
        return super().create(name)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        self._count()
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self._count()
        super().sync(file)

    def rename(self, old: str, new: str) -> None:
        self._count()
        super().rename(old, new)

    def unlink(self, name: str) -> None:
        self._count()
        super().unlink(name)


def save(segments: SegmentFolder, token: int = 1, space: Namespace = SPACE) -> None:
    index, meta = SuffixIndex(), {5: SequenceMeta("s", 10.0, token)}
    index.append(5, np.full(300, token, dtype=np.int32))
    frozen = index.freeze([5])
    segments.save(segment_of(space, Coverage(1, 1, 5, 0), frozen, meta), frozen)


def read(segments: SegmentFolder, space: Namespace = SPACE) -> int | None:
    """The token that a segment is full of."""
    loaded = segments.load(space.key, lambda _: True)
    return None if loaded is None else int(loaded.index.tokens(5)[0])


def test_a_segment_in_use_outlives_its_file(tmp_path: Path) -> None:
    segments = SegmentFolder(tmp_path)
    save(segments, 1)
    loaded = segments.load(SPACE.key, lambda _: True)
    save(segments, 2)
    segments.clear()
    assert loaded is not None and loaded.index.tokens(5).tolist() == [1] * 300


def every_failure(
    folder: Path, act: Callable[[SegmentFolder], None], check: Callable[[SegmentFolder, bool], None]
) -> int:
    """Let each operation of `act` fail once; returns how many there were."""
    for fail_at in range(1, 100):
        place = folder / str(fail_at)
        place.mkdir()
        save(SegmentFolder(place), 1)
        failing = FailingFiles(place, fail_at=fail_at)
        act(SegmentFolder(place, failing))
        check(SegmentFolder(place), failing.left > 0)
        if failing.left > 0:
            return fail_at - 1
    raise AssertionError("it never ends")


def test_whatever_fails_while_saving_one_of_both_is_there(tmp_path: Path) -> None:
    raised = []

    def act(segments: SegmentFolder) -> None:
        try:
            save(segments, 2)
        except OSError as error:
            raised.append(error)

    def check(segments: SegmentFolder, done: bool) -> None:
        assert read(segments) == (2 if done else 1)
        assert not list(segments._folder.glob("*.new"))

    count = every_failure(tmp_path, act, check)
    assert count == len(raised) == 8  # create, five writes, sync, rename


def test_a_foreign_one_is_deleted_and_another_version_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    segments = SegmentFolder(tmp_path)
    save(segments)
    mine, others = (tmp_path / f"{space.key}.segment" for space in (SPACE, OTHER))
    others.write_bytes(mine.read_bytes())
    data = bytearray(mine.read_bytes())
    data[12] = 9
    mine.write_bytes(data)
    assert read(segments) is None and read(segments, OTHER) is None
    assert "version 9" in caplog.text and "namespace" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]


def test_invalidating(tmp_path: Path) -> None:
    segments = SegmentFolder(tmp_path)
    save(segments, 1)
    save(segments, 1, OTHER)
    segments.invalidate(select(session="another").scope)
    segments.invalidate(select(tenant="c").scope)
    assert len(segments.namespaces()) == 2
    segments.invalidate(select(tenant="a").scope)
    assert segments.namespaces() == [OTHER.key]
    for name in (f"{SPACE.key}.segment.new", "0.segment"):
        (tmp_path / name).write_bytes(b"who knows")
    segments.invalidate(select(tenant="c").scope)  # nobody can tell whether they hold any of it
    assert [path.name for path in tmp_path.iterdir()] == [f"{OTHER.key}.segment"]
    segments.invalidate(select(session="s").scope)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_invalidated_is_told(tmp_path: Path) -> None:
    save(SegmentFolder(tmp_path))
    for fail_at in (1, 3):
        with pytest.raises(CacheError, match="still in"):
            SegmentFolder(tmp_path, FailingFiles(tmp_path, fail_at=fail_at)).invalidate(select(session="s").scope)
    SegmentFolder(tmp_path, FailingFiles(tmp_path, fail_at=2)).invalidate(select(tenant="c").scope)
    assert list(tmp_path.iterdir()) == []  # it could not be read, so it might have held it


def test_what_a_killed_writer_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / f"{SPACE.key}.segment.new").write_bytes(b"half")
    save(SegmentFolder(tmp_path), 1, OTHER)
    SegmentFolder(tmp_path).sweep()
    assert SegmentFolder(tmp_path).namespaces() == [OTHER.key]
    assert len(list(tmp_path.iterdir())) == 1


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    os.symlink(tmp_path / "target", tmp_path / "new")
    with pytest.raises(OSError):
        LocalFiles(tmp_path).create("new")
    assert (tmp_path / "target").read_text() == "kept"
