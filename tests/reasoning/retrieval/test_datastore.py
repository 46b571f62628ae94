"""Datastores are built whole or not at all, and belong to one model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval import datastore as module
from agentspec.reasoning.retrieval.datastore import Datastore, DatastoreManifest, build

pytestmark = pytest.mark.anyio


class Countable:
    """States that tell where they come from: [text's first token, position, token, 0]."""

    model_name = "tiny"

    def __init__(self, fingerprint: str = "f1", fails_at: int | None = None) -> None:
        self.fingerprint = fingerprint
        self.calls = 0
        self._fails_at = fails_at

    async def hidden_states(self, texts: Sequence[Sequence[int]]) -> list[Any]:
        self.calls += 1
        if self.calls == self._fails_at:
            raise KeyboardInterrupt
        return [np.array([[text[0], at, token, 0] for at, token in enumerate(text)], np.float32) for text in texts]

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(module, "BATCH_TOKENS", 30)
    monkeypatch.setattr(module, "WINDOW", 16)
    return [f"{i} " + "abc" * (i % 9) for i in range(20)] + ["x"]


async def built(corpus: Sequence[str], folder: Path, backend: Any) -> DatastoreManifest:
    return await build(corpus, folder, backend, lambda documents: None)


async def test_every_token_but_the_first_is_an_entry(corpus: list[str], tmp_path: Path) -> None:
    manifest = await built(corpus, tmp_path / "store", Countable())
    store = Datastore.open(tmp_path / "store", fingerprint="f1", model="tiny")
    assert manifest.documents == len(corpus)
    assert store.values.tolist() == [ord(letter) for text in corpus for letter in text[1:]]
    assert store.keys[:, 2].tolist() == [ord(letter) for text in corpus for letter in text[:-1]]
    assert store.keys[:, 1].max() == module.WINDOW - 1  # longer texts begin again


async def test_a_build_that_fails_leaves_what_was_there(corpus: list[str], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        await built(corpus, tmp_path / "store", Countable(fails_at=2))
    assert [*tmp_path.iterdir()] == []
    before = await built(corpus[:9], tmp_path / "store", Countable())
    with pytest.raises(KeyboardInterrupt):
        await built(corpus, tmp_path / "store", Countable(fails_at=2))
    assert Datastore.open(tmp_path / "store", fingerprint="f1", model="tiny").manifest == before
    after = await built(corpus, tmp_path / "store", Countable("f2"))
    assert Datastore.open(tmp_path / "store", fingerprint="f2", model="tiny").manifest == after
    (tmp_path / "other").mkdir()
    for name in ("manifest.json", "documents.jsonl"):  # a knowledge base
        (tmp_path / "other" / name).touch()
    with pytest.raises(ConfigurationError, match="name another folder"):
        await built(corpus, tmp_path / "other", Countable())


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (None, "holds no datastore"),
        ({}, "of this version"),
        ({"format": 9}, "format 9"),
        ({"entries": 100}, "damaged"),
        ({"fingerprint": "other"}, "hidden states do not fit"),
    ],
)
async def test_what_is_no_whole_datastore_of_this_model_is_refused(
    corpus: list[str], tmp_path: Path, manifest: dict[str, Any] | None, message: str
) -> None:
    written = await built(corpus, folder := tmp_path / "store", Countable())
    (folder / "manifest.json").unlink()
    (folder / "keys.f16").write_bytes(b"short")
    if manifest is not None:
        (folder / "manifest.json").write_text(json.dumps(asdict(written) | manifest if manifest else {}))
    with pytest.raises(ConfigurationError, match=message):
        Datastore.open(folder, fingerprint="f1", model="m")


async def test_a_corpus_without_entries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="two tokens"):
        await built(["x"], tmp_path / "store", Countable())
