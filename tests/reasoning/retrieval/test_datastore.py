"""Datastores are built in pieces that survive a kill, and belong to one model and one corpus."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval import datastore as module
from agentspec.reasoning.retrieval.datastore import Datastore, DatastoreManifest, DatastoreWriter, build, digest

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


def contents(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "keys.f16").read_bytes(), (folder / "values.i32").read_bytes()


async def test_every_token_but_the_first_is_an_entry(corpus: list[str], tmp_path: Path) -> None:
    manifest = await built(corpus, tmp_path / "store", Countable())
    store = Datastore.open(tmp_path / "store", fingerprint="f1", model="tiny")
    assert manifest.documents == len(corpus) and manifest.complete
    assert store.values.tolist() == [ord(letter) for text in corpus for letter in text[1:]]
    assert store.keys[:, 2].tolist() == [ord(letter) for text in corpus for letter in text[:-1]]
    assert store.keys[:, 1].max() == module.WINDOW - 1  # longer texts begin again


@pytest.mark.parametrize("fails_at", [1, 2, 5])
async def test_an_interrupted_build_is_resumed(corpus: list[str], tmp_path: Path, fails_at: int) -> None:
    await built(corpus, tmp_path / "whole", whole := Countable())
    with pytest.raises(KeyboardInterrupt):
        await built(corpus, tmp_path / "cut", Countable(fails_at=fails_at))
    if fails_at > 1:
        with pytest.raises(ConfigurationError, match="incomplete"):
            Datastore.open(tmp_path / "cut", fingerprint="f1", model="tiny")
        with (tmp_path / "cut" / "keys.f16").open("ab") as file:
            file.write(b"half a batch that no manifest counts")
    await built(corpus, tmp_path / "cut", rest := Countable())
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert rest.calls == whole.calls - fails_at + 1
    await built(corpus, tmp_path / "cut", again := Countable())
    assert again.calls == 0


async def test_another_model_or_corpus_is_refused(corpus: list[str], tmp_path: Path) -> None:
    await built(corpus, tmp_path / "store", Countable())
    with pytest.raises(ConfigurationError, match="hidden states do not fit"):
        await built(corpus, tmp_path / "store", Countable("f2"))
    with pytest.raises(ConfigurationError, match="another corpus"):
        await built(corpus[:9], tmp_path / "store", Countable())


async def test_one_build_at_a_time(corpus: list[str], tmp_path: Path) -> None:
    first = DatastoreWriter(tmp_path / "store", DatastoreManifest("tiny", "f1", digest(corpus)))
    with first, pytest.raises(ConfigurationError, match="another build"):
        await built(corpus, tmp_path / "store", Countable())
    assert (await built(corpus, tmp_path / "store", Countable())).complete


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (None, "holds no datastore"),
        ({}, "of this version"),
        ({"format": 9}, "format 9"),
        ({"entries": 100}, "damaged"),
        ({"complete": False}, "incomplete"),
        ({"fingerprint": "other"}, "hidden states do not fit"),
    ],
)
async def test_what_is_no_whole_datastore_of_this_model_is_refused(
    corpus: list[str], tmp_path: Path, manifest: dict[str, Any] | None, message: str
) -> None:
    written = await built(corpus, tmp_path, Countable())
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "keys.f16").write_bytes(b"short")
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(json.dumps(asdict(written) | manifest if manifest else {}))
    with pytest.raises(ConfigurationError, match=message):
        Datastore.open(tmp_path, fingerprint="f1", model="m")
    if message == "holds no datastore":
        with pytest.raises(ConfigurationError, match="two tokens"):
            await built(["x"], tmp_path, Countable())


@pytest.mark.long
def test_a_killed_build_is_resumed(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {i} " * 60}) + "\n" for i in range(150)))
    code = "from agentspec.cli import app; app()"
    command = [sys.executable, "-c", code, "knn", "build", str(file), "--model", str(tiny_model), "--out"]
    subprocess.run([*command, tmp_path / "whole"], check=True, capture_output=True, timeout=500)
    process = subprocess.Popen([*command, tmp_path / "cut"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while (now := DatastoreManifest.read(tmp_path / "cut")) is None or not now.documents:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    written = DatastoreManifest.read(tmp_path / "cut")
    assert written is not None and 0 < written.documents < 150 and not written.complete
    done = subprocess.run([*command, tmp_path / "cut"], check=True, capture_output=True, timeout=500)
    assert b"150 documents" in done.stdout
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
