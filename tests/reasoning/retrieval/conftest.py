"""Corpora of a few words, in which documents are often alike, and what makes knowledge bases of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from agentspec.reasoning.retrieval.knowledge.base import Document
from agentspec.reasoning.retrieval.knowledge.bm25 import Bm25Index
from agentspec.reasoning.retrieval.knowledge.dense import DenseIndex
from agentspec.reasoning.retrieval.knowledge.folder import Index, Kind
from tests.fakes import FakeEncoder

Make = Callable[[Kind, Sequence[str]], Index]


@pytest.fixture(scope="session")
def make_index() -> Make:
    """An index of texts, whose ids are their places."""
    encoder = FakeEncoder()

    def make(kind: Kind, texts: Sequence[str]) -> Index:
        documents = [Document(f"{at:03}", text) for at, text in enumerate(texts)]
        if kind == "bm25":
            return Bm25Index.build(documents)
        return DenseIndex.build(documents, encoder.encode_all(texts), encoder, kind)

    return make


@pytest.fixture(params=["dense", "hnsw", "bm25"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param
