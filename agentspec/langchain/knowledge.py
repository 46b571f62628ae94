"""Adapters between LangChain's retrievers and agentspec's knowledge bases, in both directions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig
from pydantic import Field

from agentspec.background import call_sync
from agentspec.errors import InvalidRequestError, KnowledgeBaseError
from agentspec.reasoning.retrieval.knowledge import base
from agentspec.reasoning.retrieval.knowledge.base import Hit, KnowledgeBase, Metric, Query, SearchResult, require_count
from agentspec.reasoning.retrieval.knowledge.bm25 import LexicalMetric, with_counts

MAX_QUERIES = 256  # of one search


class KnowledgeRetriever(BaseRetriever):
    """A knowledge base as a LangChain retriever: the best `k` documents, without scores, which depend on the query.

    `abatch` searches for as many queries at once as a service takes. The caller closes the knowledge base.
    """

    base: Any = Field(description="A `KnowledgeBase`")
    k: int = Field(default=4, ge=1)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return call_sync(self._search, [query], count_of_call(k, self.k))[0]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return (await self._search([query], count_of_call(k, self.k)))[0]

    async def abatch(
        self,
        inputs: list[str],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[list[Document]]:
        """The documents of each query, without callbacks; if a search fails, every query fails. Takes `k` besides."""
        k = kwargs.pop("k", None)
        if kwargs:
            raise InvalidRequestError(f"a search takes k and no {', '.join(kwargs)}", param=next(iter(kwargs)))
        try:
            return await self._search(inputs, count_of_call(k, self.k))
        except Exception as error:
            if not return_exceptions:
                raise
            return cast(list[list[Document]], [error] * len(inputs))

    async def _search(self, texts: Sequence[str], k: int) -> list[list[Document]]:
        base: KnowledgeBase = self.base
        documents: list[list[Document]] = []
        for start in range(0, len(texts), MAX_QUERIES):
            queries = [await base.metric.encode(text) for text in texts[start : start + MAX_QUERIES]]
            found = await base.search(queries, k)
            documents += [[_langchain(hit) for hit in hits] for hits in found.hits]
        return documents


class RetrieverKnowledge:
    """A LangChain retriever as a `KnowledgeBase`; documents keep the retriever's order.

    Cached documents are ranked by words, since the retriever's own ranking is unknown. Speculation is exact as long as
    the retriever gives the same answer to the same query; its owner changes `version` when the answers change.
    """

    def __init__(self, retriever: BaseRetriever, *, version: str = "") -> None:
        self.version = version
        self._retriever = retriever
        self._metric = LexicalMetric()

    @property
    def metric(self) -> Metric:
        return self._metric

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        require_count(count)
        version = self.version
        try:
            answers = await self._retriever.abatch([query.text for query in queries]) if queries else []
        except Exception as error:
            raise KnowledgeBaseError(f"the retriever failed: {type(error).__name__}: {error}") from error
        return SearchResult(version, tuple(_hits(documents)[:count] for documents in answers))

    async def aclose(self) -> None:
        """Do nothing: the retriever belongs to the caller."""


Usual = TypeVar("Usual", bound=int | None)


def count_of_call(asked: int | None, usual: Usual) -> int | Usual:
    """How many documents a call gets: the count that it has `asked` for, else the `usual` one.

    Raises `ConfigurationError` for a count below 1.
    """
    if asked is None:
        return usual
    require_count(asked)
    return asked


def _langchain(hit: Hit) -> Document:
    document = hit.document
    title = {"title": document.title} if document.title else {}
    return Document(id=document.id, page_content=document.text, metadata={**document.metadata, **title})


def _hits(documents: Sequence[Document]) -> tuple[Hit, ...]:
    """Each document once, scored by its place: 1, 1/2, 1/3 and so on."""
    places = enumerate(distinct(documents).items(), start=1)
    return tuple(with_counts(Hit(_ours(key, document), 1.0 / place)) for place, (key, document) in places)


def distinct(documents: Sequence[Document]) -> dict[str, Document]:
    """The documents by their ids, or by a hash of their contents, each once, in their order."""
    found: dict[str, Document] = {}
    for document in documents:
        found.setdefault(_key(document), document)
    return found


def _key(document: Document) -> str:
    if document.id is not None:
        return f"id:{document.id}"
    content = json.dumps([document.page_content, _keyed(document.metadata)], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _keyed(value: Any) -> Any:
    """Metadata as JSON can hold and sort it: its keys may be of several types."""
    if isinstance(value, Mapping):
        return {repr(key): _keyed(one) for key, one in value.items()}
    return [_keyed(one) for one in value] if isinstance(value, list | tuple) else value


def _ours(key: str, document: Document) -> base.Document:
    title = str(document.metadata.get("title") or "")
    return base.Document(document.id or key, document.page_content, title, document.metadata)
