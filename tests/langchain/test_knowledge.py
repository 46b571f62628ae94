from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import RetrieversIntegrationTests

from agentspec.errors import ConfigurationError, KnowledgeBaseError
from agentspec.langchain import KnowledgeRetriever, RetrieverKnowledge
from agentspec.reasoning.retrieval.knowledge import base
from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase, Query
from agentspec.reasoning.retrieval.knowledge.folder import IndexKnowledge, in_memory
from tests.fakes import FakeEncoder

pytestmark = pytest.mark.anyio

CORPUS = [
    base.Document("a", "the cat purrs", "Cats", {"page": 1}),
    base.Document("b", "the dog barks"),
    base.Document("c", "a river flows"),
    base.Document("d", "the cat sleeps"),
]


def base() -> IndexKnowledge:
    return in_memory(CORPUS, "dense", FakeEncoder())


class TestStandard(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[KnowledgeRetriever]:
        return KnowledgeRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"base": base()}

    @property
    def retriever_query_example(self) -> str:
        return "the cat"


def test_documents_keep_their_ids_titles_and_metadata():
    (found,) = KnowledgeRetriever(base=base(), k=1).invoke("cats the cat purrs")
    assert (found.id, found.page_content) == ("a", "the cat purrs")
    assert found.metadata == {"title": "Cats", "page": 1}


async def test_a_call_asks_for_one_document_at_least():
    retriever = KnowledgeRetriever(base=base(), k=1)
    for k in (0, -1):
        with pytest.raises(ConfigurationError, match=f"not {k}"):
            retriever.invoke("the cat", k=k)
        with pytest.raises(ConfigurationError, match=f"not {k}"):
            await retriever.abatch(["the cat"], k=k)
    assert len(retriever.invoke("the cat", k=2)) == 2


async def test_what_a_search_does_not_take_is_refused():
    retriever = KnowledgeRetriever(base=base())
    with pytest.raises(TypeError, match="top_k"):
        await retriever.abatch(["the cat"], top_k=2)
    with pytest.raises(TypeError, match="top_k"):
        retriever.invoke("the cat", top_k=2)


class Listing(BaseRetriever):
    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        if query == "bad":
            raise OSError("gone")
        return self.documents


async def test_a_retriever_is_a_knowledge_base_in_its_own_order():
    twice = Document(page_content="no id", metadata={"title": "T"})
    documents = [Document(id="z", page_content="cat"), twice, twice, Document(id="a", page_content="dog")]
    found_by = RetrieverKnowledge(Listing(documents=documents), version="7")
    assert isinstance(found_by, KnowledgeBase)
    queries = [await found_by.metric.encode(text) for text in ("cat", "dog")]
    found = await found_by.search(queries, 3)
    first = found.hits[0]
    assert found.version == "7" and [hit.document.text for hit in first] == ["cat", "no id", "dog"]
    assert [hit.score for hit in first] == [1, 1 / 2, 1 / 3] and first[1].document.title == "T"
    assert found_by.metric.scores(queries[0], first).argmax() == 0
    assert [len(hits) for hits in (await found_by.search(queries, 1)).hits] == [1, 1]
    assert (await found_by.search([], 1)).hits == ()
    with pytest.raises(KnowledgeBaseError, match="OSError: gone"):
        await found_by.search([Query("bad", ())], 1)
    with pytest.raises(ConfigurationError):
        await found_by.search(queries, 0)
    await found_by.aclose()
