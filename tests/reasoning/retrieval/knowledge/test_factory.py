"""From settings to a knowledge base, with the real embedding model where that is what is tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentspec.errors import ConfigurationError, KnowledgeBaseError
from agentspec.reasoning.retrieval.knowledge import factory
from agentspec.reasoning.retrieval.knowledge.base import Document
from agentspec.reasoning.retrieval.knowledge.factory import load_encoder, open_knowledge
from agentspec.reasoning.retrieval.knowledge.folder import build
from agentspec.reasoning.retrieval.knowledge.memory import IndexKnowledge
from agentspec.reasoning.retrieval.knowledge.remote import RemoteKnowledge
from agentspec.reasoning.retrieval.knowledge.settings import IndexSettings, RemoteSettings
from agentspec.recordings.corpus import read_corpus
from tests.fakes import FakeEncoder

pytestmark = pytest.mark.anyio


async def test_a_folder_is_opened_with_the_model_it_names_or_the_one_set(tmp_path, monkeypatch):
    monkeypatch.setattr("agentspec.backends.model_store.store.store_folder", lambda: tmp_path / "models")
    loaded: list[str] = []

    def load(model: str) -> FakeEncoder:
        loaded.append(model)
        return FakeEncoder()

    monkeypatch.setattr(factory, "load_encoder", load)
    build([Document("a", "cat")], tmp_path / "kb", "dense", encoder=FakeEncoder(), model="here")
    for model in (None, "there"):
        base = open_knowledge(IndexSettings(path=tmp_path / "kb", model=model))
        assert isinstance(base, IndexKnowledge)
        await base.aclose()
    assert loaded == ["here", "there"]
    with pytest.raises(KnowledgeBaseError, match="no knowledge base"):
        open_knowledge(IndexSettings(path=tmp_path / "elsewhere"))


def test_options_of_vectors_are_refused_for_an_index_of_words(tmp_path):
    build([Document("a", "cat")], tmp_path / "kb", "bm25")
    for name, given in (("model", "minilm"), ("threads", 2)):
        with pytest.raises(ConfigurationError, match=f"of kind bm25, whose search knows no {name}") as caught:
            open_knowledge(IndexSettings.model_validate({"path": tmp_path / "kb", name: given}))
        assert caught.value.param == name


async def test_a_service_is_opened_without_being_asked():
    service = open_knowledge(RemoteSettings.model_validate({"url": "http://127.0.0.1:9"}))
    assert isinstance(service, RemoteKnowledge)
    await service.aclose()


@pytest.mark.model
@pytest.mark.parametrize("kind", ["dense", "hnsw"])
async def test_passages_are_found_by_what_they_mean(tmp_path: Path, repository: Path, kind):
    passages = list(read_corpus(repository / "examples" / "passages.jsonl"))
    encoder = load_encoder("minilm")
    try:
        build(passages, tmp_path / "kb", kind, encoder=encoder, model="minilm")
    finally:
        encoder.close()
    base = open_knowledge(IndexSettings(path=tmp_path / "kb"))
    try:
        asked = {
            "How old is the planet, according to the father of the study of rocks?": "Geology",
            "player of American football who led two different clubs": "Super Bowl 50",
            "inventor of electric machines goes into business": "Nikola Tesla",
        }
        queries = [await base.metric.encode(text) for text in asked]
        together = await base.search(queries, 3)
        for query, title, hits in zip(queries, asked.values(), together.hits, strict=True):
            assert hits[0].document.title == title
            (alone,) = (await base.search([query], 3)).hits
            assert [(hit.document.id, hit.score) for hit in alone] == [(hit.document.id, hit.score) for hit in hits]
            assert base.metric.scores(query, hits).tolist() == [hit.score for hit in hits]
    finally:
        await base.aclose()
    assert json.loads((tmp_path / "kb" / "manifest.json").read_text())["model"] == "minilm"
