"""A knowledge base as a retriever of LangChain, by LangChain's own tests of retrievers."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.integration_tests import RetrieversIntegrationTests

from agentspec.errors import ConfigurationError
from agentspec.langchain import KnowledgeRetriever
from agentspec.reasoning.retrieval.knowledge import base
from agentspec.reasoning.retrieval.knowledge.folder import in_memory
from tests.fakes import FakeEncoder

pytestmark = pytest.mark.anyio
KNOWN = [
    base.Document("a", "the cat purrs", "Cats", {"page": 1}),
    base.Document("b", "the dog barks"),
    base.Document("c", "a river flows"),
    base.Document("d", "the cat sleeps"),
]


class TestStandard(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[KnowledgeRetriever]:
        return KnowledgeRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"base": in_memory(KNOWN, "dense", FakeEncoder())}

    @property
    def retriever_query_example(self) -> str:
        return "the cat"


async def test_a_call_asks_for_one_document_at_least() -> None:
    retriever = KnowledgeRetriever(base=in_memory(KNOWN, "dense", FakeEncoder()), k=1)
    (best,) = await retriever.ainvoke("the cat purrs")
    assert (best.id, best.metadata) == ("a", {"page": 1, "title": "Cats"})
    assert len(retriever.invoke("the cat", k=2)) == 2
    for k in (0, -1):
        with pytest.raises(ConfigurationError, match=f"not {k}"):
            retriever.invoke("the cat", k=k)
        with pytest.raises(ConfigurationError, match=f"not {k}"):
            await retriever.ainvoke("the cat", k=k)
