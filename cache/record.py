"""A finished output, as a request hands it to the cached past outputs and to the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from agentspec.cache.tokens import Tokens
from agentspec.types import Labels, Namespace


class SequenceMeta(NamedTuple):
    """Metadata of a sequence in memory: its session, when it finished, its last token `end` (-1: it is empty)."""

    session: str | None
    created_at: float  # seconds since 1970
    end: int


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """One finished output. `sequence` is its number, unique among the processes of a store.

    `context` holds the last tokens before `tokens`, at most `index.DEPTH`.
    """

    sequence: int
    namespace: Namespace
    labels: Labels
    tokens: Tokens
    context: Tokens
    created_at: float  # seconds since 1970

    @property
    def meta(self) -> SequenceMeta:
        return SequenceMeta(self.labels.session, self.created_at, int(self.tokens[-1]) if len(self.tokens) else -1)
