"""The state of one request of the server: its cache, its next tokens, and how many of the last draft were accepted."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from agentspec.cache.index import DEPTH, IndexDrafter, Sourced, SuffixIndex
from agentspec.cache.tokens import MOST_TOKEN, Tokens
from agentspec.speculation.governor import RequestStats
from agentspec.speculation.predicted_text import PredictedText
from agentspec.types import Labels, Source

_TRANSCRIPT = 0
SURE = 0.8  # no new search is needed if the next token has at least this probability
PREDICTION = "agentspec_prediction"
"""The field for extensions that holds the predicted answer's token ids."""
HOPELESS = 0.3  # a prediction that is less often right is not drafted from


class RequestCache(Protocol):
    """The cache of one request; `CacheRequest` implements it. Only the recorder calls its methods."""

    @property
    def drafter(self) -> IndexDrafter: ...

    @property
    def indexes(self) -> list[Sourced]: ...

    def extend(self, tokens: Tokens) -> None: ...

    def count_draft(self, drafted: int, accepted: int) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class PrivateCache:
    """A cache for one request that shares nothing with others. It is discarded when the request ends."""

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
        """Does nothing: a private cache has no counts."""

    def close(self) -> None:
        """Does nothing: a private cache keeps no output."""

    def abandon(self) -> None:
        """Does nothing: a private cache keeps no output."""


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What the server knows of a request: labels, tenant salt, LoRA adapter, stop tokens, the output's length limit,
    and the tokens of the answer that its client predicts.
    """

    labels: Labels = field(default_factory=Labels)
    salt: str | None = None
    adapter: str = ""
    stops: frozenset[int] = frozenset()
    max_tokens: int | None = None  # of output
    prediction: tuple[int, ...] = ()


def labels_in(fields: Mapping[str, object]) -> Labels:
    """The labels that a client sends among an engine's own fields for extensions, as `agentspec_session` and so on."""
    names = (fields.get(f"agentspec_{label}") for label in ("session", "workflow", "step"))
    return Labels(*(name if isinstance(name, str) else None for name in names))


def prediction_in(fields: Mapping[str, object]) -> tuple[int, ...]:
    """The token ids of the answer that the client predicts; empty if they cannot be token ids."""
    given = fields.get(PREDICTION)
    if not isinstance(given, list) or not all(type(token) is int and 0 <= token <= MOST_TOKEN for token in given):
        return ()
    return tuple(given)


class Continuation(NamedTuple):
    """Tokens that may follow, and for each the probability that all tokens up to it are accepted."""

    tokens: list[int]
    acceptance: list[float]

    def after(self, fresh: list[int]) -> Continuation:
        """The rest of the continuation after the output grew by `fresh`; empty if `fresh` differs from it."""
        count = len(fresh)
        if count == 0:
            return self
        if count >= len(self.tokens) or self.tokens[:count] != fresh:
            return NOTHING
        reached = self.acceptance[count - 1]
        return Continuation(self.tokens[count:], [likely / reached for likely in self.acceptance[count:]])


NOTHING = Continuation([], [])


class RequestState:
    """A request's state in the server's thread. The recorder sets `cache` when it has opened the cache."""

    __slots__ = (
        "accepted asked cache chain continuation expected finished length output_length predicted".split()
        + "ready request stats".split()
    )

    def __init__(self, length: int, stats: RequestStats, request: RequestInfo) -> None:
        self.length = length  # tokens of prompt and output
        self.stats = stats
        self.request = request
        self.output_length = 0  # tokens of output
        self.finished = False
        self.cache: RequestCache | None = None
        self.ready = threading.Event()  # set also if opening the cache failed
        self.continuation = NOTHING
        self.chain: list[int] = []  # the part of the continuation that was proposed in the last round
        self.asked = False
        self.expected = 0.0
        self.accepted = 0
        self.predicted = PredictedText(request.prediction) if request.prediction else None

    def advance(self, fresh: Tokens) -> Tokens:
        """Count how many tokens of the last chain `fresh` accepted; returns the tokens of `fresh` that are output.

        The target may sample tokens after the end of an output; the server cuts them off later.
        """
        tokens = fresh.tolist()
        self.accepted = 0
        for proposed, token in zip(self.chain, tokens, strict=False):
            if proposed != token:
                break
            self.accepted += 1
        self.continuation = self.continuation.after(tokens)
        if self.predicted is not None:
            self.predicted.follow(tokens)
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
        """Whether the continuation is long and likely enough to need no new search."""
        return len(self.continuation.tokens) >= max(1, len(self.chain)) and self.continuation.acceptance[0] >= SURE

    def from_prediction(self, limit: int) -> Continuation:
        """What the client predicts next; empty where its prediction is lost or has mostly been wrong of late."""
        text = self.predicted
        if text is None or text.confidence < HOPELESS or not (tokens := text.ahead(limit)):
            return NOTHING
        return Continuation(tokens, [text.confidence**count for count in range(1, len(tokens) + 1)])

    def acceptance(self, limit: int) -> list[float]:
        """The acceptance probabilities of at most `limit` next tokens, corrected by the request's drafts so far."""
        factor = min(1.0, self.stats.factor)
        return [factor * likely for likely in self.continuation.acceptance[:limit]]

    def propose(self, count: int, expected: float) -> list[int]:
        """Take the first `count` tokens of the continuation as the chain to verify."""
        self.chain, self.expected = self.continuation.tokens[:count], expected
        return self.chain
