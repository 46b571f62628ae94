"""Texts that an operator gives a running server to draft from (SGLang's external corpora)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np

from agentspec.cache.index import Sourced, SuffixIndex
from agentspec.types import Source

SEPARATOR = -(2**31)
"""The token with which SGLang begins each document but the first."""


class ExternalTexts:
    """Named texts in one index, bounded by `most` tokens. A text counts against the bound once it is committed.

    One thread at a time loads; others may draft, commit, remove and list meanwhile.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._index = SuffixIndex()
        self._numbers = count()
        self._sequences: dict[str, list[int]] = {}
        self._committed: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def sourced(self) -> Sourced:
        return self._index, Source.SHARED

    @property
    def remaining(self) -> int:
        """Tokens for which there is room."""
        with self._lock:
            return self._most - sum(self._committed.values())

    def load(self, name: str, chunks: Iterable[Sequence[int]]) -> int:
        """Add a text, whole or not at all; returns its tokens. Raises `ValueError` for one too many or too long."""
        if name in self._sequences:
            raise ValueError(f"External corpus {name!r} already exists: remove it first")
        documents, loaded, room = [list[int]()], 0, self.remaining
        for chunk in chunks:
            loaded += len(chunk)
            if loaded > room:
                raise ValueError(f"External corpus {name!r} exceeds the {room} tokens that there is room for")
            for token in chunk:
                if token == SEPARATOR:
                    documents.append([])
                else:
                    documents[-1].append(token)
        if not any(documents):
            raise ValueError(f"External corpus {name!r} holds no tokens")
        self._sequences[name] = [self._add(document) for document in documents if document]
        return loaded

    def commit(self, name: str, tokens: int) -> None:
        with self._lock:
            self._committed[name] = tokens

    def remove(self, name: str) -> None:
        """Remove a text. A name that is not there is no error, as in SGLang."""
        with self._lock:
            self._committed.pop(name, None)
        if numbers := self._sequences.pop(name, None):
            self._index.remove(numbers)

    def sizes(self) -> dict[str, int]:
        """Tokens of each committed text."""
        with self._lock:
            return dict(self._committed)

    def _add(self, document: Sequence[int]) -> int:
        number = next(self._numbers)
        self._index.append(number, np.array(document, dtype=np.int32))
        self._index.close(number)
        return number
