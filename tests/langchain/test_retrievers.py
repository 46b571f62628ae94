"""LangChain's retrievers: of knowledge bases and back, and ahead on guesses, with the result of the true documents."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import RetrieversIntegrationTests
from pydantic import Field

from agentspec.errors import ConfigurationError
from agentspec.langchain import KnowledgeRetriever, SpeculativeRetriever
from agentspec.reasoning.retrieval.knowledge import base
from agentspec.reasoning.retrieval.knowledge.folder import IndexKnowledge, in_memory
from tests.fakes import FakeEncoder

pytestmark = pytest.mark.anyio

CORPUS = ["the cat purrs", "the dog barks", "a river flows", "the cat sleeps", "dogs and cats", "a stone"]
DOCUMENTS = [Document(id=str(at), page_content=text) for at, text in enumerate(CORPUS)]


class Scripted(BaseRetriever):
    """Finds documents by the number of shared words. Notes what it is asked, and waits for `gate` if there is one."""

    asked: list[str] = Field(default_factory=list)
    documents: list[Document] = Field(default_factory=lambda: list(DOCUMENTS))
    gate: Any = None

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        self.asked.append(query)
        if query == "fails":
            raise OSError("down")
        words = set(query.split())
        return sorted(self.documents, key=lambda one: (-len(words & set(one.page_content.split())), str(one.id)))[:4]

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        if self.gate is not None:
            await self.gate.wait()
        return self._get_relevant_documents(query, run_manager=run_manager)


def around(inner: Scripted | None = None, **options: Any) -> tuple[SpeculativeRetriever, Scripted]:
    inner = inner or Scripted()
    return SpeculativeRetriever(retriever=inner, **options), inner


class TestStandard(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[SpeculativeRetriever]:
        return SpeculativeRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"retriever": Scripted()}

    @property
    def retriever_query_example(self) -> str:
        return "the cat"


async def text_of(documents: list[Document]) -> str:
    await asyncio.sleep(0)
    return " | ".join(document.page_content for document in documents)


QUERIES = st.lists(st.sampled_from(["the cat", "the dog", "a stone", "cat sleeps", "river", "fails"]), max_size=8)


@given(QUERIES, st.integers(1, 3), st.sampled_from([0, 1000, 1 << 20]))
def test_going_ahead_gives_the_result_of_the_true_documents(queries: list[str], k: int, max_bytes: int) -> None:
    async def main() -> None:
        retriever, inner = around(k=k, max_bytes=max_bytes)
        with retriever.request():
            for at, query in enumerate(queries):
                if query == "fails":
                    with pytest.raises(OSError, match="down"):
                        await retriever.ahead(query, text_of)
                    continue
                plain = inner.invoke(query)[:k]
                assert await retriever.ahead(query, text_of) == await text_of(plain)
                inner.documents = inner.documents[::-1] if at % 3 else inner.documents[1:]
        assert retriever.stats.confirmed <= retriever.stats.guesses <= retriever.stats.calls == len(queries)

    asyncio.run(main())


async def test_a_right_guess_begins_before_the_retriever_answers_and_a_wrong_one_is_cancelled() -> None:
    gate = asyncio.Event()
    retriever, inner = around(Scripted(gate=gate))
    begun: list[str] = []

    async def write(documents: list[Document]) -> str:
        begun.append(documents[0].page_content)
        gate.set()
        if begun[-1] == "the cat purrs" and len(begun) > 2:
            await asyncio.get_running_loop().create_future()  # ends only by being cancelled
        return begun[-1]

    with retriever.request():
        gate.set()
        assert await retriever.ahead("the cat sleeps", write) == "the cat sleeps"
        gate.clear()
        assert await retriever.ahead("cat sleeps", write) == "the cat sleeps"  # it would else wait for ever
        inner.documents = [DOCUMENTS[5]]
        gate.clear()
        assert await retriever.ahead("cat purrs", write) == "a stone"
    assert begun == ["the cat sleeps", "the cat sleeps", "the cat purrs", "a stone"]
    assert (retriever.stats.calls, retriever.stats.guesses, retriever.stats.confirmed) == (3, 2, 1)


async def test_a_continuation_that_fails_on_a_guess_counts_only_if_the_guess_was_right() -> None:
    retriever, inner = around()

    async def picky(documents: list[Document]) -> str:
        if documents[0].id == "3":
            raise ValueError("not that one")
        return documents[0].page_content

    with retriever.request():
        await retriever.ainvoke("the cat sleeps")
        with pytest.raises(ValueError, match="not that one"):
            await retriever.ahead("the cat sleeps", picky)
        inner.documents = [DOCUMENTS[5]]
        assert await retriever.ahead("the cat sleeps", picky) == "a stone"


async def test_a_request_shares_nothing_with_another_nor_with_calls_outside() -> None:
    retriever, _ = around()

    async def one() -> None:
        with retriever.request():
            await retriever.ahead("the cat", text_of)

    await asyncio.gather(one(), one())
    await retriever.ahead("the cat", text_of)
    await retriever.ahead("the cat", text_of)
    assert (retriever.stats.calls, retriever.stats.guesses) == (4, 0)


KNOWN = [
    base.Document("a", "the cat purrs", "Cats", {"page": 1}),
    base.Document("b", "the dog barks"),
    base.Document("c", "a river flows"),
    base.Document("d", "the cat sleeps"),
]


def knowledge() -> IndexKnowledge:
    return in_memory(KNOWN, "dense", FakeEncoder())


@pytest.mark.parametrize("retriever", [KnowledgeRetriever(base=knowledge(), k=1), around(k=1)[0]])
async def test_a_call_asks_for_one_document_at_least(retriever: BaseRetriever) -> None:
    assert len(retriever.invoke("the cat", k=2)) == 2 and len(await retriever.ainvoke("the cat")) == 1
    for k in (0, -1):
        with pytest.raises(ConfigurationError, match=f"not {k}"):
            retriever.invoke("the cat", k=k)
        with pytest.raises(ConfigurationError, match=f"not {k}"):
            await retriever.ainvoke("the cat", k=k)
