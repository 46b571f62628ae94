"""A knowledge base over HTTP: sends a batch of queries in one request, and validates everything in the response."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import anyio

from agentspec.backends.http import Endpoint, Transport
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import KnowledgeBaseError, UpstreamError
from agentspec.reasoning.retrieval.knowledge.base import Hit, Metric, Query, SearchResult
from agentspec.reasoning.retrieval.knowledge.bm25 import Bm25Metric
from agentspec.reasoning.retrieval.knowledge.dense import DenseMetric
from agentspec.reasoning.retrieval.knowledge.lexical import LexicalMetric, with_counts
from agentspec.reasoning.retrieval.knowledge.memory import require_count
from agentspec.reasoning.retrieval.knowledge.settings import RemoteSettings
from agentspec.reasoning.retrieval.knowledge.wire import parse_found, search_body


class RemoteKnowledge:
    """A `KnowledgeBase` that queries a service. `dense` is the metric of its embedding model, if the settings name one.

    A search that fails or times out is retried as often as the settings allow, by default never.
    """

    def __init__(
        self,
        settings: RemoteSettings,
        dense: DenseMetric | None = None,
        *,
        name: str | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._settings, self._dense = settings, dense
        self._metric: Metric = dense or (Bm25Metric() if settings.ranks_by == "bm25" else LexicalMetric())
        self._endpoint = Endpoint(_http_settings(settings), name=name, transport=transport)

    @property
    def metric(self) -> Metric:
        return self._metric

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        require_count(count)
        if not queries:
            return SearchResult("", ())
        body = json.dumps(search_body(queries, count, self._fingerprint)).encode()
        answer = await self._answer(body)
        try:
            found, encoder = parse_found(json.loads(answer), len(queries), count)
            if self._fingerprint not in (None, encoder):
                raise ValueError(f"it ranks by embedding model {encoder}, not by {self._settings.model}")
            return replace(found, hits=tuple(tuple(map(self._usable, hits)) for hits in found.hits))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise KnowledgeBaseError(f"knowledge base {self._endpoint.name} gave no usable answer: {error}") from None

    async def aclose(self) -> None:
        await self._endpoint.aclose()
        if self._dense is not None:
            self._dense.encoder.close()

    @property
    def _fingerprint(self) -> str | None:
        return None if self._dense is None else self._dense.encoder.fingerprint

    async def _answer(self, body: bytes) -> bytes:
        for tries_left in range(self._settings.retries, -1, -1):
            try:
                with anyio.fail_after(self._settings.timeout):
                    return await self._endpoint.fetch("POST", "/search", body=body)
            except TimeoutError:
                error, reason = None, f"gave no answer within {self._settings.timeout:g} s"
            except UpstreamError as failure:
                error, reason = failure, f"could not be asked: {failure}"
            if not tries_left:
                raise KnowledgeBaseError(f"knowledge base {self._endpoint.name} {reason}") from error
        raise AssertionError("unreachable")

    def _usable(self, hit: Hit) -> Hit:
        """`hit` with the features that the metric needs. Raises `ValueError` if the service failed to send them."""
        if self._settings.ranks_by == "words":
            return with_counts(hit)
        if self._dense is None and not isinstance(hit.features, Mapping):
            raise ValueError(f"document {hit.document.id!r} comes without weights")
        if self._dense is not None and getattr(hit.features, "shape", None) != (self._dense.encoder.dimensions,):
            raise ValueError(f"document {hit.document.id!r} comes without its vector")
        return hit


def _http_settings(settings: RemoteSettings) -> OpenAISettings:
    """The same settings in the form that the HTTP `Endpoint` of upstream backends takes."""
    return OpenAISettings(
        base_url=settings.url,
        api_key=settings.api_key,
        api_key_file=settings.api_key_file,
        connect_timeout=settings.connect_timeout,
        read_timeout=settings.timeout,
        vllm="off",
    )
