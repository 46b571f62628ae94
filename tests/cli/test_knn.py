"""The commands end to end on a tiny model: a datastore is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

WORDS = "one two three four five six seven eight"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"title": f"Part {i}", "text": WORDS * 2}) + "\n" for i in range(8)))
    return file


def test_a_datastore_is_built(program: Any, tiny_model: Path, corpus: Path, tmp_path: Path) -> None:
    store, model = tmp_path / "store", ("--model", tiny_model)
    built = program("knn", "build", corpus, "--out", store, *model)
    assert built.exit_code == 0, built.output
    assert "entries of 8 documents" in built.output


def test_another_corpus_is_refused(program: Any, tiny_model: Path, corpus: Path, tmp_path: Path) -> None:
    store, model = tmp_path / "store", ("--model", tiny_model)
    assert program("knn", "build", corpus, "--out", store, *model).exit_code == 0
    corpus.write_text(json.dumps({"text": "something else"}) + "\n")
    refused = program("knn", "build", corpus, "--out", store, *model)
    assert refused.exit_code == 2 and "another corpus" in refused.output
