"""One request of the server: where its drafts come from, and how much of the last one was accepted."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from agentspec.cache.index import DEPTH, IndexDrafter, Sourced, SuffixIndex
from agentspec.cache.tokens import Tokens
from agentspec.speculation.governor import RequestStats
from agentspec.types import Labels, Source

_TRANSCRIPT = 0
SURE = 0.8  # probability of the next token from which on no new search is needed


class RequestCache(Protocol):
    """Where a request's output is kept; `CacheRequest` is one. Only the recorder calls its methods."""

    @property
    def drafter(self) -> IndexDrafter: ...

    @property
    def indexes(self) -> list[Sourced]: ...

    def extend(self, tokens: Tokens) -> None: ...

    def count_draft(self, drafted: int, accepted: int) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class PrivateCache:
    """For a request that must leave nothing behind and see nothing of others: gone when it ends."""

    def __init__(self, prompt: Tokens) -> None:
        self.drafter = IndexDrafter()
        self._context = prompt[-DEPTH:]
        self._index = SuffixIndex()
        self._index.append(_TRANSCRIPT, prompt)

    @property
    def indexes(self) -> list[Sourced]:
        return [(self._index, Source.SESSION)]

    def extend(self, tokens: Tokens) -> None:
        self.drafter.observe(self.indexes, self._context, tokens)
        self._index.append(_TRANSCRIPT, tokens)
        self._context = np.concatenate((self._context, tokens))[-DEPTH:]

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Nothing is counted."""

    def close(self) -> None:
        """Nothing is kept."""

    def abandon(self) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What the server knows of a request: tenant salt, labels, LoRA adapter, where its output ends at the latest."""

    labels: Labels = field(default_factory=Labels)
    salt: str | None = None
    adapter: str = ""
    stops: frozenset[int] = frozenset()
    max_tokens: int | None = None  # of output


class Continuation(NamedTuple):
    """Tokens that may follow, and for each the probability that the output reaches it."""

    tokens: list[int]
    acceptance: list[float]

    def after(self, fresh: list[int]) -> Continuation:
        """What is left after the output grew by `fresh`; nothing where it differs."""
        count = len(fresh)
        if count == 0:
            return self
        if count >= len(self.tokens) or self.tokens[:count] != fresh:
            return NOTHING
        reached = self.acceptance[count - 1]
        return Continuation(self.tokens[count:], [likely / reached for likely in self.acceptance[count:]])


NOTHING = Continuation([], [])


class RequestState:
    """What the server's thread knows of a request. `cache` is set by the recorder once it is open."""

    __slots__ = (
        "accepted asked cache chain continuation expected finished length output_length ready request stats".split()
    )

    def __init__(self, length: int, stats: RequestStats, request: RequestInfo) -> None:
        self.length = length  # of prompt and output
        self.stats = stats
        self.request = request
        self.output_length = 0  # tokens of output
        self.finished = False
        self.cache: RequestCache | None = None
        self.ready = threading.Event()  # set also where opening the cache failed
        self.continuation = NOTHING
        self.chain: list[int] = []  # so much of it was proposed in the last round
        self.asked = False
        self.expected = 0.0
        self.accepted = 0

    def advance(self, fresh: Tokens) -> Tokens:
        """Count how much of the last chain the new tokens `fresh` accepted; returns those of them that are output.

        The target may sample beyond the end of an output; the server cuts that off later.
        """
        tokens = fresh.tolist()
        self.accepted = 0
        for proposed, token in zip(self.chain, tokens, strict=False):
            if proposed != token:
                break
            self.accepted += 1
        self.continuation = self.continuation.after(tokens)
        self.length += len(fresh)
        return fresh[: self._still_output(tokens)]

    def _still_output(self, fresh: list[int]) -> int:
        request, count = self.request, 0
        while count < len(fresh) and not self.finished:
            count += 1
            self.output_length += 1
            self.finished = fresh[count - 1] in request.stops or self.output_length == request.max_tokens
        return count

    def is_certain(self) -> bool:
        """Whether the continuation found before is long and likely enough that nothing need be searched."""
        return len(self.continuation.tokens) >= max(1, len(self.chain)) and self.continuation.acceptance[0] >= SURE

    def acceptance(self, limit: int) -> list[float]:
        """Probabilities that the next `limit` tokens at most are accepted, corrected by its drafts so far."""
        factor = min(1.0, self.stats.factor)
        return [factor * likely for likely in self.continuation.acceptance[:limit]]

    def propose(self, count: int, expected: float) -> list[int]:
        """Take the first `count` tokens of the continuation as the chain to verify."""
        self.chain, self.expected = self.continuation.tokens[:count], expected
        return self.chain
