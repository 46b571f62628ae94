from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from agentspec.cache.storage.remote.objects import PART, FolderObjects, SegmentObjects, StoreObjects, open_objects
from agentspec.errors import ConfigurationError


@pytest.fixture(params=["folder", "file", "memory", "local"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> SegmentObjects:
    folder = tmp_path / "objects"
    if request.param == "local":  # fsspec's own way to files, as an object store
        pytest.importorskip("fsspec")
        return open_objects(f"local://{folder}")
    if request.param == "memory":
        pytest.importorskip("fsspec")
    named = {"folder": str(folder), "file": f"file://{folder}", "memory": f"memory://{uuid.uuid4().hex}/below"}
    return open_objects(named[request.param])


def test_objects_come_and_go_whole(objects: SegmentObjects, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    assert objects.names() == []
    for name, data in (("a/one", b"first"), ("b/two", b""), ("a/one", b"replaced")):
        source.write_bytes(data)
        objects.send(source, name)
    assert sorted(objects.names()) == ["a/one", "b/two"]
    assert (objects.read("a/one"), objects.read("a/one", 3), objects.read("b/two")) == (b"replaced", b"rep", b"")
    objects.fetch("a/one", copy)
    assert copy.read_bytes() == b"replaced"
    for _ in range(2):
        objects.delete("a/one")
    assert objects.names() == ["b/two"]
    for missing in (lambda: objects.read("a/one"), lambda: objects.fetch("a/one", copy)):
        with pytest.raises(FileNotFoundError):
            missing()


def test_files_are_their_owners_and_what_is_half_written_is_listed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x")
    objects = FolderObjects(tmp_path / "objects")
    objects.send(source, "tenant/one")
    sent = tmp_path / "objects" / "tenant" / "one"
    assert sent.stat().st_mode & 0o077 == 0
    sent.with_name("two.1234.new").write_bytes(b"half")
    assert sorted(objects.names()) == ["tenant/one", f"tenant/two.1234{PART}"]


def test_errors_of_a_store_are_those_of_files() -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("no credentials")

    with pytest.raises(OSError, match="no credentials"):
        StoreObjects(Broken(), "bucket").names()


def test_passwords_are_in_no_error() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigurationError) as refused:
        open_objects("nothing://somebody:canary@bucket/below")
    assert "canary" not in refused.value.message and "nothing://***@bucket" in refused.value.message


def test_a_url_that_nothing_knows_is_refused() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        open_objects("nothing://bucket")
