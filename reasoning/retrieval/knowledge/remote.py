"""A knowledge base over HTTP: sends a batch of queries in one request, and validates everything in the response.

docs/retrieval.md describes the request and the response.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from agentspec.backends.http import Endpoint, Transport
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import KnowledgeBaseError, UpstreamError
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, Query, SearchResult
from agentspec.reasoning.retrieval.knowledge.bm25 import LexicalMetric, with_terms
from agentspec.reasoning.settings import RemoteSettings

SECONDS = 30.0  # without a byte of an answer


class _Found(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str
    text: str
    score: FiniteFloat
    title: str = ""
    metadata: dict[str, Any] = {}


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True)

    results: list[list[_Found]]
    version: str = ""


class RemoteKnowledge:
    """A `KnowledgeBase` that queries a service with an unknown ranking: cached documents are ranked by words."""

    def __init__(
        self, settings: RemoteSettings, *, name: str | None = None, transport: Transport | None = None
    ) -> None:
        self.metric = LexicalMetric()
        reached = OpenAISettings(
            base_url=settings.url,
            api_key=settings.api_key,
            api_key_file=settings.api_key_file,
            read_timeout=SECONDS,
            server_kind="other",
        )
        self._endpoint = Endpoint(reached, name=name, transport=transport)

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        if not queries:
            return SearchResult("", ())
        body = json.dumps({"queries": [{"text": query.text} for query in queries], "count": count}).encode()
        try:
            found = _Answer.model_validate_json(await self._endpoint.fetch("POST", "/search", body=body))
            if len(found.results) != len(queries):
                raise ValueError(f"{len(found.results)} results for {len(queries)} queries")
        except UpstreamError as error:
            raise KnowledgeBaseError(f"knowledge base {self._endpoint.name} could not be asked: {error}") from error
        except ValueError as error:
            cause = _first(error) if isinstance(error, ValidationError) else error
            raise KnowledgeBaseError(f"knowledge base {self._endpoint.name} gave no usable answer: {cause}") from None
        return SearchResult(found.version, tuple(_hits(documents)[:count] for documents in found.results))

    async def aclose(self) -> None:
        await self._endpoint.aclose()


def _hits(documents: Sequence[_Found]) -> tuple[Hit, ...]:
    """Hits by score, then id; only the best hit of each document is kept."""
    distinct: dict[str, Hit] = {}
    for found in sorted(documents, key=lambda found: (-found.score, found.id)):
        document = Document(found.id, found.text, found.title, found.metadata)
        distinct.setdefault(found.id, with_terms(Hit(document, found.score)))
    return tuple(distinct.values())


def _first(error: ValidationError) -> str:
    wrong = error.errors()[0]
    return f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}".removeprefix(": ")
