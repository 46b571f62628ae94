from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentspec.reasoning.retrieval.knowledge import folder
from agentspec.reasoning.retrieval.knowledge.folder import open_folder
from tests.fakes import FakeEncoder

LINES = [
    {"id": "a", "title": "Cats", "text": "the cat purrs"},
    {"id": "b", "title": "Dogs", "text": "the dog barks " * 20},
    {"id": "c", "text": "a river flows"},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


@pytest.fixture(autouse=True)
def encoders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The references that models were loaded by."""
    loaded: list[str] = []

    def load(model: str) -> FakeEncoder:
        loaded.append(model)
        return FakeEncoder()

    monkeypatch.setattr(folder, "load_encoder", load)
    return loaded


@pytest.mark.parametrize("kind", ["dense", "hnsw", "bm25"])
def test_a_built_knowledge_base_can_be_searched(program, corpus, encoders, kind):
    result = program("kb", "build", corpus, "--out", "kb", "--kind", kind)
    assert result.exit_code == 0 and result.stdout.startswith(f"kb: 3 documents by {kind}, version ")
    base = open_folder(Path("kb"), folder.load_encoder)

    async def found(text: str) -> list[str]:
        hits = (await base.search([await base.metric.encode(text)], 2)).hits[0]
        await base.aclose()
        return [hit.document.id for hit in hits]

    assert asyncio.run(found("the dog barks"))[0] == "b"
    assert encoders == ([] if kind == "bm25" else ["minilm"] * 2)


def test_a_model_in_a_folder_is_found_again_from_anywhere(program, corpus, encoders, model_folder):
    values = json.loads(program("kb", "build", corpus, "--out", "kb", "--model", "model", "--json").stdout)
    assert values["model"] == str(model_folder) and values["encoder"] == "fake-16" and values["bad"] == 0
    assert len(values["version"]) == 64 and set(values["files"]) == {"documents.jsonl", "index.faiss"}


def test_an_index_of_words_takes_no_model(program, corpus):
    refused = program("kb", "build", corpus, "--out", "kb", "--kind", "bm25", "--model", "minilm")
    assert refused.exit_code == 2 and "leave --model out" in refused.stderr and not Path("kb").exists()


def test_bad_lines_are_named_and_left_out_on_demand(program, corpus):
    with corpus.open("a") as file:
        file.write('no\n{"id": "a", "text": "again"}\n')
    refused = program("kb", "build", corpus, "--out", "kb", "--kind", "bm25")
    assert refused.exit_code == 2 and "corpus.jsonl:4: not valid JSON" in refused.stderr
    assert not Path("kb").exists()
    result = program("kb", "build", corpus, "--out", "kb", "--kind", "bm25", "--skip-bad")
    assert result.exit_code == 0 and "2 lines left out" in result.stdout
    assert "the id 'a' was given in" in result.stderr


def test_an_empty_corpus_and_a_foreign_folder_are_refused(program, tmp_path, corpus):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert "no documents" in program("kb", "build", empty, "--out", "kb", "--kind", "bm25").stderr
    refused = program("kb", "build", corpus, "--out", tmp_path, "--kind", "bm25")
    assert refused.exit_code == 2 and "exists and is no index" in refused.stderr


@pytest.mark.parametrize(
    "names", [(), ("manifest.json",), ("manifest.json", "popup.js"), ("manifest.json", "keys.f16")]
)
def test_only_an_index_is_replaced(program, tmp_path, corpus, names):
    (folder := tmp_path / "kb").mkdir()
    for name in names:
        (folder / name).write_text("{}")
    assert program("kb", "build", corpus, "--out", folder, "--kind", "bm25").exit_code == 2
    assert {path.name for path in folder.iterdir()} == {*names}


def test_an_index_beside_its_corpus_is_not_replaced(program, tmp_path, corpus):
    assert program("kb", "build", corpus, "--out", tmp_path / "kb", "--kind", "bm25").exit_code == 0
    kept = corpus.rename(tmp_path / "kb" / "corpus.jsonl")
    assert program("kb", "build", kept, "--out", tmp_path / "kb", "--kind", "bm25").exit_code == 2 and kept.exists()


WORDS = "one two three four five six seven eight"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"title": f"Part {i}", "text": WORDS * 2}) + "\n" for i in range(8)))
    return file


def test_a_datastore_is_built(program, tiny_model: Path, texts: Path, tmp_path: Path) -> None:
    store, model = tmp_path / "store", ("--model", tiny_model)
    built = program("knn", "build", texts, "--out", store, *model)
    assert built.exit_code == 0, built.output
    assert "entries of 8 documents" in built.output
