from __future__ import annotations

import json

import pytest

from agentspec.backends.model_store.convert import is_prepared
from agentspec.backends.model_store.store import compute_sha256


@pytest.fixture
def folder(store, tmp_path):
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")
    manifest = {"format": 1, "source_sha256": "abc", "files": {"weights": compute_sha256(folder / "weights")}}
    (folder / "agentspec.json").write_text(json.dumps(manifest))
    return folder


def test_an_undamaged_folder_is_prepared(folder):
    assert is_prepared(folder, "abc")
    assert is_prepared(folder, "abc", fresh=True)


def test_another_source_is_not(folder):
    assert not is_prepared(folder, "abd")


@pytest.mark.parametrize("name", ["weights", "agentspec.json"])
@pytest.mark.parametrize("text", ["", "damaged", "[]", "{}"])
def test_a_damaged_file_is_noticed(folder, name, text):
    assert is_prepared(folder, "abc")
    (folder / name).write_text(text)
    assert not is_prepared(folder, "abc")


def test_a_missing_file_is_noticed(folder):
    (folder / "weights").unlink()
    assert not is_prepared(folder, "abc")


def test_another_format_is_not_ours(folder):
    manifest = json.loads((folder / "agentspec.json").read_text())
    (folder / "agentspec.json").write_text(json.dumps(manifest | {"format": 2}))
    assert not is_prepared(folder, "abc")
