from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from agentspec.errors import ConfigurationError, KnowledgeBaseError
from agentspec.reasoning.retrieval.knowledge.base import Document, KnowledgeBase
from agentspec.reasoning.retrieval.knowledge.folder import (
    IndexKnowledge,
    Kind,
    build,
    open_folder,
    open_knowledge,
    read_manifest,
)
from agentspec.reasoning.settings import IndexSettings
from tests.fakes import FakeEncoder

pytestmark = pytest.mark.anyio

CORPUS = [
    Document("b", "the dog barks", "Dogs", {"page": 2}),
    Document("a", "the cat purrs", "Cats"),
    Document("c", "a river flows"),
]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTSPEC_MODELS", str(tmp_path / "models"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "new" / "kb"


def build_in(out: Path, kind: Kind, documents: list[Document] = CORPUS, encoder: FakeEncoder | None = None) -> None:
    build(documents, out, kind, encoder=encoder or FakeEncoder(), model="fake")


def opened(out: Path) -> IndexKnowledge:
    return open_folder(out, lambda model: FakeEncoder())


async def first(base: KnowledgeBase, text: str) -> tuple[Document, str]:
    found = await base.search([await base.metric.encode(text)], 2)
    return found.hits[0][0].document, found.version


async def test_what_was_built_is_found_and_stays_open_when_the_folder_changes(out, kind):
    build_in(out, kind)
    base, once = opened(out), read_manifest(out)
    assert isinstance(base, KnowledgeBase) and len(base.index.documents) == 3
    before = await first(base, "cats purrs the cat")
    assert before == (CORPUS[1], once.version)
    assert (await first(base, "dogs the dog barks"))[0].metadata == {"page": 2}
    build_in(out, kind, CORPUS[::-1])
    assert read_manifest(out) == once  # the same corpus has the same version in any order
    build_in(out, kind, [Document("z", "the cat purrs loudly")])
    assert await first(base, "cats purrs the cat") == before
    document, after = await first(opened(out), "the cat purrs")
    assert document.id == "z" and after == read_manifest(out).version != once.version
    assert [path.name for path in out.parent.iterdir()] == ["kb"]
    out.rename(out.with_name("elsewhere"))
    assert await first(base, "cats purrs the cat") == before
    await base.aclose()


def test_an_index_of_another_model_is_refused(out):
    build_in(out, "dense", encoder=FakeEncoder(8))
    with pytest.raises(ConfigurationError, match="not the model"):
        opened(out)


@pytest.mark.parametrize("name", ["documents.jsonl", "vocabulary.json", "bm25.npz"])
def test_a_damaged_or_missing_file_is_an_error(out, name):
    build_in(out, "bm25")
    (out / name).write_bytes(b"{}")
    with pytest.raises(KnowledgeBaseError, match="not what was built"):
        opened(out)
    (out / name).unlink()
    with pytest.raises(KnowledgeBaseError, match="build it again"):
        opened(out)


def test_a_wrong_manifest_is_an_error(out):
    build_in(out, "bm25")
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps(manifest | {"format": 9}))
    with pytest.raises(KnowledgeBaseError, match="format 9"):
        opened(out)
    (out / "manifest.json").write_text(json.dumps(manifest | {"kind": "dense"}))
    with pytest.raises((KnowledgeBaseError, ConfigurationError)):
        opened(out)
    (out / "manifest.json").write_text("no")
    with pytest.raises(KnowledgeBaseError, match="cannot be read"):
        opened(out)


@pytest.mark.parametrize("error", [OSError("no room"), KeyboardInterrupt()])
def test_a_build_that_fails_or_is_stopped_between_old_and_new_leaves_the_old(out, monkeypatch, error):
    build_in(out, "bm25")
    before, rename = read_manifest(out), Path.rename

    def stopped(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stopped)  # the moment between two system calls
    with pytest.raises(type(error)):
        build_in(out, "bm25", CORPUS[:1])
    assert read_manifest(out) == before
    assert [path.name for path in out.parent.iterdir()] == ["kb"]


def test_corpora_and_folders_that_cannot_be_used_are_refused(out, tmp_path):
    with pytest.raises(ConfigurationError, match="no documents"):
        build([], out, "bm25")
    with pytest.raises(ConfigurationError, match="two documents with the id 'a'"):
        build([*CORPUS, Document("a", "again")], out, "bm25")
    with pytest.raises(ConfigurationError, match="needs an embedding model"):
        build(CORPUS, out, "dense")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigurationError, match="no index or datastore"):
        build_in(tmp_path / "mine", "bm25")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot write"):
        build_in(tmp_path / "file" / "kb", "bm25")


async def test_a_search_does_not_block_the_event_loop(make_index):
    index = make_index("bm25", ["cat"])

    together = threading.Barrier(3)  # which three searches pass that run at the same time

    class Slow:
        metric, documents = index.metric, index.documents

        def search(self, queries, count):
            together.wait(60)
            return index.search(queries, count)

    base = IndexKnowledge(Slow(), "1")
    query = await base.metric.encode("cat")
    found = await asyncio.gather(*(base.search([query], 1) for _ in range(3)))
    assert {one.version for one in found} == {"1"}


async def test_a_folder_is_opened_with_the_model_it_names_and_closes_it(out, tmp_path):
    build_in(out, "dense")
    encoders = dict[str, FakeEncoder]()
    base = open_folder(out, lambda model: encoders.setdefault(model, FakeEncoder()))
    for _ in range(2):
        await base.aclose()
    assert [(model, encoder.closed) for model, encoder in encoders.items()] == [("fake", True)]
    with pytest.raises(KnowledgeBaseError, match="no knowledge base"):
        open_knowledge(IndexSettings(path=out / "elsewhere"))
