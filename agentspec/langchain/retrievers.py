"""Retrievers of LangChain: one of a knowledge base, and one that goes on with a guess."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field, PrivateAttr

from agentspec.background import call_sync
from agentspec.reasoning.retrieval.knowledge import base
from agentspec.reasoning.retrieval.knowledge.base import (
    Hit,
    KnowledgeBase,
    Query,
    RetrievedDocuments,
    require_count,
)
from agentspec.reasoning.retrieval.knowledge.bm25 import LexicalMetric, terms, with_counts
from agentspec.reasoning.speculative_task import cancel_tasks

T = TypeVar("T")

_WHOLE = "document"  # in the metadata of what is remembered: the document as it was found


class KnowledgeRetriever(BaseRetriever):
    """A knowledge base as a LangChain retriever: the best `k` documents, without scores, which depend on the query.

    The caller closes the knowledge base.
    """

    base: Any = Field(description="A `KnowledgeBase`")
    k: int = Field(default=4, ge=1)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return call_sync(self._search, query, _count(k, self.k))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return await self._search(query, _count(k, self.k))

    async def _search(self, text: str, k: int) -> list[Document]:
        base: KnowledgeBase = self.base
        found = await base.search([await base.metric.encode(text)], k)
        return [_langchain(hit) for hit in found.hits[0]]


def _count(asked: int | None, usual: int) -> int:
    """How many documents a call gets: what it asks for, else the usual count. Raises `ConfigurationError` below 1."""
    if asked is None:
        return usual
    require_count(asked)
    return asked


def _langchain(hit: Hit) -> Document:
    document = hit.document
    title = {"title": document.title} if document.title else {}
    return Document(id=document.id, page_content=document.text, metadata={**document.metadata, **title})


def _distinct(documents: Sequence[Document]) -> dict[str, Document]:
    """The documents by their ids, or by a hash of their contents, each once, in their order."""
    found: dict[str, Document] = {}
    for document in documents:
        content = repr((document.page_content, document.metadata)).encode("utf-8", "surrogatepass")
        key = hashlib.sha256(content).hexdigest() if document.id is None else f"id:{document.id}"
        found.setdefault(key, document)
    return found


@dataclass(slots=True)
class RetrievalStats:
    """Counts of calls by `ahead`, of those that had a guess, and of right guesses."""

    calls: int = 0
    guesses: int = 0
    confirmed: int = 0


@dataclass(slots=True)
class _Request:
    """What was found in one request. Thread-safe."""

    cache: RetrievedDocuments
    metric: LexicalMetric = field(default_factory=LexicalMetric)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self, documents: Sequence[Document]) -> None:
        found = _distinct(_copies(documents)).items()
        known = (base.Document(key, one.page_content, metadata={_WHOLE: one}) for key, one in found)
        hits = [with_counts(Hit(document, 0.0)) for document in known]
        with self.lock:
            self.cache.add("", [hits])

    def guess(self, query: str, k: int) -> list[Document] | None:
        with self.lock:
            hits = self.cache.ranking(Query(query, terms(query)), self.metric)[:k]
        return _copies([hit.document.metadata[_WHOLE] for hit in hits]) if len(hits) == k else None


_request: ContextVar[_Request | None] = ContextVar("agentspec_retrieval_request", default=None)


class SpeculativeRetriever(BaseRetriever):
    """Wraps `retriever`, whose answers are always those that count; at most `k` documents of each are handed out.

    `ahead` guesses an answer from the documents found before in the same request, a `with retriever.request():` block.
    """

    retriever: BaseRetriever
    k: int = Field(default=1, ge=1, description="Documents handed out; the others found are only remembered")
    max_bytes: int = Field(default=8 << 20, ge=0, description="Most that is remembered of a request")

    _stats: RetrievalStats = PrivateAttr(default_factory=RetrievalStats)

    @property
    def stats(self) -> RetrievalStats:
        """The counts so far."""
        return self._stats

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Calls inside the block belong to one request; what they found is forgotten at the end."""
        token = _request.set(_Request(RetrievedDocuments(self.max_bytes)))
        try:
            yield
        finally:
            _request.reset(token)

    async def ahead(self, query: str, then: Callable[[list[Document]], Awaitable[T]]) -> T:
        """Run `then` on guessed documents while the retriever is queried, and run it again if the guess was wrong.

        Returns the result of `then` for the retriever's documents. Side effects of `then` may happen twice: the run on
        a wrong guess is cancelled at any point.
        """
        request = _request.get()
        guess = None if request is None else request.guess(query, self.k)
        self._stats.calls += 1
        if guess is None:
            return await then(await self.ainvoke(query))
        self._stats.guesses += 1
        truth, early = asyncio.create_task(self.ainvoke(query)), asyncio.create_task(_result(then(_copies(guess))))
        try:
            documents = await truth
            if documents == guess:
                self._stats.confirmed += 1
                return await early
        finally:
            await cancel_tasks(truth, early)
        return await then(documents)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        k = _count(k, self.k)
        return _learned(self.retriever.invoke(query, {"callbacks": run_manager.get_child()}))[:k]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        k = _count(k, self.k)
        return _learned(await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}))[:k]


async def _result(of: Awaitable[T]) -> T:
    return await of


def _learned(documents: list[Document]) -> list[Document]:
    if (request := _request.get()) is not None:
        request.learn(documents)
    return documents


def _copies(documents: Sequence[Document]) -> list[Document]:
    """Deep copies, which others may change; shallow ones where metadata cannot be copied so, as a connection."""
    copies = []
    for document in documents:
        try:
            copies.append(document.model_copy(deep=True))
        except Exception:  # whatever `deepcopy` raises for an object of the caller's
            copies.append(document.model_copy(update={"metadata": dict(document.metadata)}))
    return copies
