"""The store's locks, hashes and child programs."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.model_store.store import (
    compute_sha256,
    end_all,
    file_sha256,
    fingerprint,
    locked,
    run,
    scratch,
    store_folder,
)
from agentspec.errors import ModelUnavailableError


def test_the_environment_chooses_the_folder(store, monkeypatch):
    assert store_folder() == store
    monkeypatch.setenv("AGENTSPEC_MODELS", "~/models")
    assert store_folder() == Path.home() / "models"
    monkeypatch.delenv("AGENTSPEC_MODELS")
    assert store_folder().name == "models"


@given(data=st.binary(max_size=100))
def test_the_hash_is_the_files(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("hash") / "file"
    path.write_bytes(data)
    assert compute_sha256(path) == hashlib.sha256(data).hexdigest()


def test_a_hash_is_remembered_until_the_file_changes(store, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first = file_sha256(path)
    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time: only a fresh look can tell
    assert file_sha256(path) == first
    assert file_sha256(path, fresh=True) == hashlib.sha256(b"two").hexdigest()
    path.write_bytes(b"three")
    assert file_sha256(path) == hashlib.sha256(b"three").hexdigest()


def test_a_damaged_note_is_no_obstacle(store, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first = file_sha256(path)
    for note in (store / "hashes").iterdir():
        note.write_text("{")
    assert file_sha256(path) == first


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


def test_status_and_output():
    done = run([sys.executable, "-c", "import os, sys; print(os.environ['A']); sys.exit('no')"], {"A": "b"})
    assert (done.returncode, done.stdout, done.stderr) == (1, "b\n", "no\n")


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
