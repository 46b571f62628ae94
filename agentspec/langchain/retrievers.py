"""A knowledge base as a retriever of LangChain."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field

from agentspec.background import call_sync
from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.base import Hit, KnowledgeBase, search
from agentspec.step.scope import current_policy
from agentspec.telemetry import tracing


class KnowledgeRetriever(BaseRetriever):
    """A knowledge base as a LangChain retriever: the best `k` documents, without scores, which depend on the query.

    The caller closes the knowledge base. A call may ask for another `k`; below 1 it raises `ConfigurationError`.
    """

    base: Any = Field(description="A `KnowledgeBase`")
    k: int = Field(default=4, ge=1)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return call_sync(self._search, query, k)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        return await self._search(query, k)

    async def _search(self, text: str, k: int | None) -> list[Document]:
        base: KnowledgeBase = self.base
        if k is not None and k < 1:
            raise ConfigurationError(f"ask for at least one document, not {k}", param="k")
        shown = text if tracing.captures_content() and current_policy().store is not False else None
        found = await search(base, [await base.metric.encode(text)], self.k if k is None else k, shown)
        return [_langchain(hit) for hit in found.hits[0]]


def _langchain(hit: Hit) -> Document:
    document = hit.document
    title = {"title": document.title} if document.title else {}
    return Document(id=document.id, page_content=document.text, metadata={**document.metadata, **title})
