"""KNN-LM with speculative retrieval: neighbours are guessed from the request's cache and verified a batch at a time.

KNN-LM by Khandelwal et al. 2020, its speculation by RaLMSpec (Zhang et al. 2024, section 5.3). The answer is that of a
KNN-LM that asks the datastore for every token, byte for byte: each token is drawn from the same numbers with the
same noise, and a guess only decides whether the forward that follows it is there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from agentspec.backends.base import Floats, StepwiseDecoding
from agentspec.reasoning.retrieval.knn.mixture import Mixture, Prior
from agentspec.reasoning.retrieval.knn.search import DatastoreSearch, NeighbourCache, Neighbours
from agentspec.reasoning.retrieval.knn.stride import KnnStride
from agentspec.types import KnnSpeculation


@dataclass(frozen=True, slots=True, eq=False)
class TokenGuess:
    """One token ahead of what is known: the model's part of its distribution, the query, and what was drawn.

    `token` is None where there was nothing to guess from; `decided` where no neighbour can change it.
    """

    prior: Prior
    query: Floats
    token: int | None
    decided: bool = False


@dataclass(slots=True)
class KnnCounters:
    """What an answer took: forwards, tokens `decided` without neighbours, guesses and how many came true, and seconds.

    `trace` has the queries of each search.
    """

    forwards: int = 0
    decided: int = 0
    guessed: int = 0
    right: int = 0
    wrong: int = 0
    queries: int = 0
    trace: list[int] = field(default_factory=list)
    model_seconds: float = 0.0
    guess_seconds: float = 0.0
    search_seconds: float = 0.0

    def summary(self) -> KnnSpeculation:
        return KnnSpeculation(
            drafted=self.guessed,
            accepted=self.right,
            steps=self.forwards,
            wrong=self.wrong,
            decided=self.decided,
            queries=self.queries,
            searches=len(self.trace),
            strides=tuple(self.trace),
            model_seconds=self.model_seconds,
            guess_seconds=self.guess_seconds,
            search_seconds=self.search_seconds,
        )


@dataclass(slots=True)
class KnnDecoder:
    """Decodes one answer, a forward or a search at a time. `cache` is None for sequential KNN-LM.

    With `bound`, a token that the model alone decides (see `Mixture.decided`) asks for no neighbours.
    """

    datastore: DatastoreSearch
    mixture: Mixture
    count: int
    cache: NeighbourCache | None = None
    stride: KnnStride = field(default_factory=KnnStride)
    bound: bool = True
    counters: KnnCounters = field(default_factory=KnnCounters)
    _pending: list[TokenGuess] = field(default_factory=list)
    _known: int = 0
    _over: bool = False
    _since: float | None = None  # the end of the last guess or search

    def advance(self, steps: StepwiseDecoding) -> list[int]:
        """Do the next forward or search; the tokens that are certain now."""
        if self._due():
            return self._verify(steps)
        if not self._pending:
            self._known = len(steps.tokens)
        guess = self._guess(steps)
        if guess.token is not None:
            self._over = steps.add(guess.token)
        if guess.decided and not self._pending and guess.token is not None:
            self.counters.decided += 1
            return [guess.token]
        self._pending.append(guess)
        return []

    @property
    def _queries(self) -> int:
        return sum(not guess.decided for guess in self._pending)

    def _due(self) -> bool:
        """Whether the guesses have to be verified before there can be more."""
        if not self._pending:
            return False
        return self._over or self._pending[-1].token is None or self._queries >= self.stride.choose()

    def _guess(self, steps: StepwiseDecoding) -> TokenGuess:
        began = perf_counter()
        state = steps.advance()
        self.counters.forwards += 1
        prior = self.mixture.prior(state.logits)
        self.counters.model_seconds += (forwarded := perf_counter()) - began
        if self.cache is None:
            return TokenGuess(prior, state.hidden, None)
        if self.bound and steps.plain and (token := self.mixture.decided(prior)) is not None:
            return TokenGuess(prior, state.hidden, token, decided=True)
        token = None
        if len(self.cache):
            token = steps.draw(self.mixture.scores(prior, self.cache.search(state.hidden, self.count)))
        self.counters.guess_seconds += (now := perf_counter()) - forwarded
        if self._since is not None:
            self.stride.guessed(now - self._since)
        self._since = now
        return TokenGuess(prior, state.hidden, token)

    def _verify(self, steps: StepwiseDecoding) -> list[int]:
        """Draw every guessed token again, now from the datastore's neighbours, up to the first that is another."""
        pending, self._pending = self._pending, []
        neighbours = iter(self._search([guess.query for guess in pending if not guess.decided]))
        steps.rewind(self._known)
        tokens = list[int]()
        for guess in pending:
            token = guess.token if guess.decided else steps.draw(self.mixture.scores(guess.prior, next(neighbours)))
            assert token is not None, "what is decided has a token"
            self._over = steps.add(token)
            tokens.append(token)
            if token != guess.token:
                break
        self._count(pending, tokens)
        self._since = perf_counter()
        return tokens

    def _search(self, queries: Sequence[Floats]) -> list[Neighbours]:
        if not queries:
            return []
        began = perf_counter()
        found = self.datastore.search(np.stack(queries), self.count)
        if self.cache is not None:
            self.cache.add(found)
        seconds = perf_counter() - began
        self.stride.searched(seconds)
        self.counters.search_seconds += seconds
        self.counters.queries += len(queries)
        self.counters.trace.append(len(queries))
        return found

    def _count(self, pending: Sequence[TokenGuess], tokens: Sequence[int]) -> None:
        """Note how the guesses did, as far as they were verified."""
        seen = list(zip(pending, tokens, strict=False))
        guessed = [guess.token == token for guess, token in seen if guess.token is not None and not guess.decided]
        self.counters.decided += sum(guess.decided for guess, _ in seen)
        self.counters.guessed += sum(guess.token is not None and not guess.decided for guess in pending)
        self.counters.right += sum(guessed)
        self.counters.wrong += len(guessed) - sum(guessed)
        if guessed:
            self.stride.verified(sum(guessed), wrong=not all(guessed))
