"""Token ids as contiguous int32 arrays, which all code inside the cache uses; finished outputs of them; budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.index import are_tokens
from agentspec.errors import InvalidRequestError
from agentspec.types import Namespace

Tokens = NDArray[np.int32]
TokensLike = NDArray[np.integer] | Sequence[int]

EMPTY: Tokens = np.zeros(0, dtype=np.int32)
MOST_TOKEN = 2**31 - 2
"""The highest token id: orders of contexts need one number above it."""

_WHOLE = int, np.integer
_REAL = int, float, np.floating


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
    session: str | None
    tokens: Tokens
    context: Tokens
    created_at: float  # seconds since 1970

    @property
    def meta(self) -> SequenceMeta:
        return SequenceMeta(self.session, self.created_at, int(self.tokens[-1]) if len(self.tokens) else -1)


def as_tokens(value: TokensLike, name: str = "tokens") -> Tokens:
    """`value` as a one-dimensional contiguous int32 array, without a copy if it is such an array already.

    Raises `InvalidRequestError`, with `param` set to `name`, for another dtype or shape and for ids outside
    0 .. 2^31 - 2.
    """
    if type(value) is np.ndarray and are_tokens(value):
        return value  # type: ignore[return-value]
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidRequestError(f"{name} must be a flat sequence of token ids: {error}", param=name) from error
    if array.ndim != 1:
        raise InvalidRequestError(f"{name} must be one-dimensional, not of shape {array.shape}", param=name)
    if array.size == 0:
        return EMPTY
    if array.dtype.kind not in "iu":
        raise InvalidRequestError(f"{name} must be integers, not of dtype {array.dtype}", param=name)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > MOST_TOKEN:
        wrong = low if low < 0 else high
        raise InvalidRequestError(f"{name} must be ids from 0 to {MOST_TOKEN}, not {wrong}", param=name)
    return np.ascontiguousarray(array, dtype=np.int32)


def require_budget(max_tokens: int, min_probability: float) -> None:
    """Raise `InvalidRequestError` unless `max_tokens` >= 0 and 0 <= `min_probability` <= 1."""
    whole = isinstance(max_tokens, _WHOLE) and not isinstance(max_tokens, bool)
    if not whole or not 0 <= max_tokens < 1 << 63:
        raise InvalidRequestError(f"max_tokens must be an integer, 0 or more, not {max_tokens!r}", param="max_tokens")
    if not isinstance(min_probability, _REAL) or not 0.0 <= min_probability <= 1.0:
        raise InvalidRequestError(
            f"min_probability must lie between 0 and 1, not {min_probability!r}", param="min_probability"
        )
