"""One request of the server: what its drafts are made from, and what became of the last one."""

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
SURE = 0.8  # probability of the next token that makes looking again unnecessary


class Memory(Protocol):
    """Where a conversation is remembered; `CacheRequest` is one. Used by the recorder, but for the two properties."""

    @property
    def drafter(self) -> IndexDrafter: ...

    @property
    def indexes(self) -> list[Sourced]: ...

    def extend(self, tokens: Tokens) -> None: ...

    def count_draft(self, drafted: int, accepted: int) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class PrivateMemory:
    """Of a request that must leave nothing behind and see nothing of others: gone when it ends."""

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
        """Nobody is told."""

    def close(self) -> None:
        """Nothing is kept."""

    def abandon(self) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a server says of a request: whose it is, which adapter answers it, where its output ends at the latest."""

    labels: Labels = field(default_factory=Labels)
    salt: str | None = None
    adapter: str = ""
    stops: frozenset[int] = frozenset()
    most: int | None = None  # tokens of output


class Ahead(NamedTuple):
    """What may follow: tokens, and for each the probability that the output goes on that far."""

    tokens: list[int]
    worth: list[float]

    def after(self, fresh: list[int]) -> Ahead:
        """What is left now that the output grew by `fresh`: nothing where it went another way."""
        count = len(fresh)
        if count == 0:
            return self
        if count >= len(self.tokens) or self.tokens[:count] != fresh:
            return NOTHING
        sure = self.worth[count - 1]
        return Ahead(self.tokens[count:], [worth / sure for worth in self.worth[count:]])


NOTHING = Ahead([], [])


class Conversation:
    """What the server's thread knows of a request. `memory` is set by the recorder once it is ready."""

    __slots__ = "accepted ahead asked chain expected length memory over pace ready request said".split()

    def __init__(self, length: int, pace: RequestStats, request: Request) -> None:
        self.length = length  # of prompt and output
        self.pace = pace
        self.request = request
        self.said = 0  # tokens of output
        self.over = False
        self.memory: Memory | None = None
        self.ready = threading.Event()  # whether or not there is a memory
        self.ahead = NOTHING
        self.chain: list[int] = []  # so much of it was proposed in the last round
        self.asked = False
        self.expected = 0.0
        self.accepted = 0

    def advance(self, fresh: Tokens) -> Tokens:
        """The row grew by `fresh`, which tells how much of the last chain was right; what of it is output.

        The target verifies and samples beyond the end of an output, which the server cuts off later.
        """
        tokens = fresh.tolist()
        self.accepted = 0
        for proposed, token in zip(self.chain, tokens, strict=False):
            if proposed != token:
                break
            self.accepted += 1
        self.ahead = self.ahead.after(tokens)
        self.length += len(fresh)
        return fresh[: self._still_output(tokens)]

    def _still_output(self, fresh: list[int]) -> int:
        request, count = self.request, 0
        while count < len(fresh) and not self.over:
            count += 1
            self.said += 1
            self.over = fresh[count - 1] in request.stops or self.said == request.most
        return count

    def knows(self) -> bool:
        """Whether what was drafted before goes far enough, so that nothing need be searched."""
        return len(self.ahead.tokens) >= max(1, len(self.chain)) and self.ahead.worth[0] >= SURE

    def worth(self, most: int) -> list[float]:
        """What at most so many of the tokens ahead are worth, by how this request's drafts did so far."""
        factor = min(1.0, self.pace.factor)
        return [factor * worth for worth in self.ahead.worth[:most]]

    def propose(self, count: int, expected: float) -> list[int]:
        """So much of what is ahead is to be verified."""
        self.chain, self.expected = self.ahead.tokens[:count], expected
        return self.chain
