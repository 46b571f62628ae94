"""The JSON that clients and services of knowledge bases exchange over HTTP (docs/retrieval.md describes it in full).

Texts and scores are enough. With vectors or weights a client can rank documents as the service does.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentspec.protocol.validation import is_text
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, Query, SearchResult

MAX_QUERIES, MAX_COUNT = 256, 1000


def search_body(queries: Sequence[Query], count: int, encoder: str | None) -> dict[str, Any]:
    """The body of `POST /search`. `encoder` is the fingerprint of the model that made the queries' vectors."""
    body: dict[str, Any] = {"queries": [_query_json(query) for query in queries], "count": count}
    return body if encoder is None else body | {"encoder": encoder}


def found_json(found: SearchResult, encoder: str | None) -> dict[str, Any]:
    """The response body of `POST /search`."""
    results = [[_hit_json(hit) for hit in hits] for hits in found.hits]
    answer = {"version": found.version, "results": results}
    return answer if encoder is None else answer | {"encoder": encoder}


def parse_search(body: Any) -> tuple[list[Query], int, str | None]:
    """The queries, the number of documents for each, and the encoder of the vectors. Raises `ValueError`."""
    fields = _object(body, "the body")
    queries = [_parse_query(item) for item in _list(fields.get("queries"), "queries")]
    count = fields.get("count")
    if not 1 <= len(queries) <= MAX_QUERIES:
        raise ValueError(f"queries must be 1 to {MAX_QUERIES}")
    if type(count) is not int or not 1 <= count <= MAX_COUNT:
        raise ValueError(f"count must be a whole number from 1 to {MAX_COUNT}")
    encoder = fields.get("encoder")
    return queries, count, None if encoder is None else _text(encoder, "encoder")


def parse_found(answer: Any, queries: int, count: int) -> tuple[SearchResult, str | None]:
    """Parse a response: at most `count` distinct documents for each query, best first, and the encoder it names.

    Fewer documents are fine. Raises `ValueError` for a response that is invalid or not for `queries` queries.
    """
    fields = _object(answer, "the answer")
    results = _list(fields.get("results"), "results")
    if len(results) != queries:
        raise ValueError(f"{len(results)} results for {queries} queries")
    version = _text(fields.get("version", ""), "version")
    encoder = fields.get("encoder")
    hits = tuple(_parse_hits(_list(result, "a result"))[:count] for result in results)
    return SearchResult(version, hits), None if encoder is None else _text(encoder, "encoder")


def _query_json(query: Query) -> dict[str, Any]:
    vector = query.features
    return {"text": query.text} | ({"vector": _packed(vector)} if isinstance(vector, np.ndarray) else {})


def _hit_json(hit: Hit) -> dict[str, Any]:
    document, features = hit.document, hit.features
    fields = {"id": document.id, "title": document.title, "text": document.text, "score": hit.score}
    if document.metadata:
        fields["metadata"] = dict(document.metadata)
    if isinstance(features, np.ndarray):
        return fields | {"vector": _packed(features)}
    if isinstance(features, Mapping) and not isinstance(features, Counter):
        return fields | {"weights": dict(features)}
    return fields


def _parse_query(value: Any) -> Query:
    fields = _object(value, "a query")
    return Query(_text(fields.get("text"), "text"), _unpacked(fields.get("vector")))


def _parse_hits(values: Sequence[Any]) -> tuple[Hit, ...]:
    """Parse hits and sort them by score, then id; only the best hit of each document is kept."""
    distinct: dict[str, Hit] = {}
    for hit in sorted((_parse_hit(value) for value in values), key=lambda hit: (-hit.score, hit.document.id)):
        distinct.setdefault(hit.document.id, hit)
    return tuple(distinct.values())


def _parse_hit(value: Any) -> Hit:
    fields = _object(value, "a document")
    score = fields.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise ValueError("score must be a finite number")
    document = Document(
        _text(fields.get("id"), "id"),
        _text(fields.get("text"), "text"),
        _text(fields.get("title", ""), "title"),
        _object(fields.get("metadata", {}), "metadata"),
    )
    vector = _unpacked(fields.get("vector"))
    return Hit(document, float(score), _weights(fields.get("weights")) if vector is None else vector)


def _weights(value: Any) -> dict[str, float] | None:
    if value is None:
        return None
    return {term: float(weight) for term, weight in _object(value, "weights").items()}


def _packed(vector: np.ndarray[Any, Any]) -> str:
    """Little-endian float32 in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _unpacked(value: Any) -> np.ndarray[Any, Any] | None:
    if value is None:
        return None
    vector = np.frombuffer(base64.b64decode(_text(value, "vector"), validate=True), "<f4").astype(np.float32)
    if not np.isfinite(vector).all():
        raise ValueError("vector must hold finite numbers")
    return vector


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not is_text(value):
        raise ValueError(f"{what} must be a text")
    return value
