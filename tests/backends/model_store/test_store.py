"""The store's locks, hashes, conversions and child programs."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time

import pytest

from agentspec.backends.model_store.store import (
    compute_sha256,
    end_all,
    file_sha256,
    fingerprint,
    is_prepared,
    locked,
    run,
    scratch,
)
from agentspec.errors import ModelUnavailableError


def test_a_hash_is_remembered_until_the_file_changes(store, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first = file_sha256(path)
    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time: it is not read again
    assert file_sha256(path) == first
    path.write_bytes(b"three")
    assert file_sha256(path) == hashlib.sha256(b"three").hexdigest()


def test_a_store_that_cannot_be_written_still_hashes(tmp_path, monkeypatch):
    (tmp_path / "store").write_text("a file, not a folder")
    monkeypatch.setenv("AGENTSPEC_MODELS", str(tmp_path / "store"))
    (tmp_path / "file").write_bytes(b"one")
    assert file_sha256(tmp_path / "file") == hashlib.sha256(b"one").hexdigest()
    with pytest.raises(ModelUnavailableError, match="AGENTSPEC_MODELS"), locked(tmp_path / "store" / "tiny"):
        pass


def test_the_lock_lets_one_in_at_a_time(store):
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        with locked(store / "tiny"):
            inside += 1
            most = max(most, inside)
            threading.Event().wait(0.01)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_what_an_interrupted_process_left_is_swept(store):
    with locked(store / "tiny"), scratch(store / "tiny") as folder:
        (folder / "half").write_text("x")
        kept = store / "tiny" / ".partial-left-behind"
        kept.mkdir()
    assert not folder.exists()
    assert kept.exists()
    with locked(store / "tiny"):
        assert not kept.exists()


def test_the_fingerprint_follows_weights_and_config_only(store, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    first = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("anything")
    assert fingerprint(tmp_path) == first
    (tmp_path / "config.json").write_text('{"a": 1}')
    second = fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert len({first, second, fingerprint(tmp_path)}) == 3


def test_ending_what_runs():
    ended: list[int] = []
    thread = threading.Thread(
        target=lambda: ended.append(run([sys.executable, "-c", "import time; time.sleep(60)"]).returncode)
    )
    thread.start()
    limit = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < limit:
        end_all()
        time.sleep(0.02)
    assert ended and ended[0] < 0
    end_all()


@pytest.mark.parametrize("name", ["weights", "agentspec.json"])
@pytest.mark.parametrize("text", ["", "damaged", "[]", "{}", None])
def test_a_conversion_is_taken_while_it_is_undamaged_and_of_this_source(store, tmp_path, name, text):
    (tmp_path / "weights").write_bytes(b"weights")
    manifest = {"format": 1, "source_sha256": "abc", "files": {"weights": compute_sha256(tmp_path / "weights")}}
    for change, taken in ({}, True), ({"source_sha256": "abd"}, False), ({"format": 2}, False), ({}, True):
        (tmp_path / "agentspec.json").write_text(json.dumps(manifest | change))
        assert is_prepared(tmp_path, "abc") is taken
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    assert not is_prepared(tmp_path, "abc")
