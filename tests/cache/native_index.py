"""The native index and drafter as tests call them: with lists, and with what only tests look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.index import IndexDrafter, Sourced, SuffixIndex, propose_batch
from agentspec.cache.tokens import EMPTY, TokensLike, as_tokens
from agentspec.types import Draft


class Successors(NamedTuple):
    """The distinct tokens that followed a context, ascending, with their counts, and the newest token."""

    tokens: NDArray[np.int32]
    counts: NDArray[np.int64]
    most_recent: int | None


class Work(NamedTuple):
    """Positions looked at, sorted or moved: `locked` while other changes waited, `longest_hold` in one go of that."""

    locked: int
    longest_hold: int


class NativeIndex(SuffixIndex):
    def append(self, sequence: int, tokens: TokensLike, context: TokensLike = EMPTY) -> None:
        super().append(sequence, as_tokens(tokens), as_tokens(context))

    def remove(self, sequences: Iterable[int]) -> None:
        super().remove(np.array(list(sequences), dtype=np.int64))

    def freeze(self, sequences: Iterable[int]) -> tuple[NDArray[Any], ...]:
        return super().freeze(np.array(list(sequences), dtype=np.int64))

    def count(self, context: TokensLike) -> int:
        return int(self.successors(context).counts.sum())

    def successors(self, context: TokensLike) -> Successors:
        tokens, counts, newest = super().successors(as_tokens(context))
        return Successors(tokens, counts, newest if newest >= 0 else None)


def work(index: SuffixIndex) -> Work:
    return Work(*index.work())


class NativeDrafter(IndexDrafter):
    def draft(
        self,
        indexes: Sequence[Sourced],
        context: TokensLike,
        max_tokens: int = 32,
        min_probability: float = 0.0,
        *,
        chain: bool = False,
    ) -> Draft:
        [draft] = propose_batch([(self, indexes, as_tokens(context), max_tokens, min_probability, chain)])
        return draft

    def observe(self, indexes: Sequence[Sourced], context: TokensLike, tokens: TokensLike) -> None:
        super().observe(indexes, as_tokens(context), as_tokens(tokens))
