"""Caches the past answers of a retriever by scope, and guesses its next answer from them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from langchain_core.documents import Document

from agentspec.reasoning.retrieval.knowledge import base
from agentspec.reasoning.retrieval.knowledge.base import Hit, Query, best_rows
from agentspec.reasoning.retrieval.knowledge.lexical import LexicalMetric, terms, with_counts

Score = Callable[[str, list[Document]], Sequence[float]]

MAX_SCOPES = 1024


def key_of(document: Document) -> str:
    """A document's id, or a hash of its content if it has no id."""
    if document.id is not None:
        return f"id:{document.id}"
    content = json.dumps([document.page_content, _keyed(document.metadata)], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _keyed(value: Any) -> Any:
    """Metadata as JSON can hold and sort it: its keys may be of several types."""
    if isinstance(value, Mapping):
        return {repr(key): _keyed(one) for key, one in value.items()}
    return [_keyed(one) for one in value] if isinstance(value, list | tuple) else value


def copies(documents: Sequence[Document]) -> list[Document]:
    """Deep copies, which the caller may change without changing `documents`; of metadata that cannot be copied so, such
    as a connection, shallow ones.
    """
    return [_copy(document) for document in documents]


def _copy(document: Document) -> Document:
    try:
        return document.model_copy(deep=True)
    except Exception:  # whatever `deepcopy` raises for an object of the caller's
        return document.model_copy(update={"metadata": dict(document.metadata)})


class ScopeDocuments:
    """The cached documents of one scope. Not thread-safe: `DocumentCaches` holds a lock around each use."""

    def __init__(self) -> None:
        self.characters = 0
        self._documents: OrderedDict[str, tuple[Document, Hit]] = OrderedDict()
        self._answers: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._usual = 0
        self._metric = LexicalMetric()

    def learn(self, query: str, documents: Sequence[Document]) -> None:
        """Store copies of the documents that the retriever returned for `query`."""
        keys = tuple(key_of(document) for document in documents)
        for key, document in zip(keys, copies(documents), strict=True):
            self._forget(key)
            hit = with_counts(Hit(base.Document(key, document.page_content), 0.0))
            self._documents[key] = document, hit
            self.characters += len(document.page_content)
        if self._answers.pop(query, None) is None:
            self.characters += len(query)
        self._answers[query] = keys
        self._usual = len(keys)

    def guess(self, query: str, k: int | None, score: Score | None) -> list[Document] | None:
        """The earlier answer to the same query, else the best-ranked cached documents; None if there are too few."""
        keys = self._answers.get(query)
        if keys is not None and all(key in self._documents for key in keys):
            return [self._documents[key][0] for key in keys[:k]]
        wanted = self._usual if k is None else min(k, self._usual)
        if not 0 < wanted <= len(self._documents):
            return None
        kept = [self._documents[key] for key in sorted(self._documents)]
        return [kept[at][0] for at in best_rows(self._scores(query, kept, score), wanted)]

    def shrink(self) -> bool:
        """Evict the oldest answer, or without answers the oldest document. Returns whether anything was evicted."""
        if self._answers:
            self.characters -= len(self._answers.popitem(last=False)[0])
        elif self._documents:
            self._forget(next(iter(self._documents)))
        else:
            return False
        return True

    def _scores(self, query: str, kept: Sequence[tuple[Document, Hit]], score: Score | None) -> np.ndarray:
        if score is not None:
            return np.asarray(score(query, [document for document, _ in kept]), np.float64)
        return self._metric.scores(Query(query, terms(query)), [hit for _, hit in kept])

    def _forget(self, key: str) -> None:
        if (known := self._documents.pop(key, None)) is not None:
            self.characters -= len(known[0].page_content)


class RequestScope:
    """The scope of one request. Documents that arrive after its end are not cached."""

    over = False


class DocumentCaches:
    """The caches of all scopes, with at most `max_characters` of text. Evicts the least recently filled. Thread-safe.

    The scope None has no cache: nothing is stored and nothing guessed.
    """

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._caches: OrderedDict[Hashable, ScopeDocuments] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def characters(self) -> int:
        with self._lock:
            return self._total()

    def learn(self, scope: Hashable, query: str, documents: Sequence[Document]) -> None:
        if scope is None:
            return
        with self._lock:
            if isinstance(scope, RequestScope) and scope.over:
                return
            cache = self._caches.setdefault(scope, ScopeDocuments())
            self._caches.move_to_end(scope)
            cache.learn(query, documents)
            while len(self._caches) > MAX_SCOPES or (len(self._caches) > 1 and self._total() > self._max_characters):
                self._caches.popitem(last=False)
            while cache.characters > self._max_characters and cache.shrink():
                pass

    def guess(self, scope: Hashable, query: str, k: int | None, score: Score | None) -> list[Document] | None:
        """A copy of the guess of the scope's cache; None without a guess."""
        with self._lock:
            cache = self._caches.get(scope)
            guess = None if cache is None else cache.guess(query, k, score)
            return None if guess is None else copies(guess)

    def end(self, request: RequestScope) -> None:
        with self._lock:
            request.over = True
            self._caches.pop(request, None)

    def _total(self) -> int:
        return sum(cache.characters for cache in self._caches.values())
