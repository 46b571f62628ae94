"""KNN-LM with speculative retrieval: guesses neighbours from the request's cache, and verifies guesses in batches.

KNN-LM is by Khandelwal et al. 2020, its speculation by RaLMSpec (Zhang et al. 2024, section 5.3). The answer equals,
byte for byte, that of a KNN-LM which searches the datastore for every token: each token is drawn from the same scores
with the same noise. A right guess only means that the forward after the token has already been computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.base import Capabilities, Floats, is_local
from agentspec.errors import ConfigurationError, NotReadyError
from agentspec.protocol.speculation import KnnSpeculation
from agentspec.reasoning.retrieval.datastore import Datastore, Values
from agentspec.reasoning.settings import KnnLmSettings
from agentspec.reasoning.strategy import Dependencies, ModelRef, Strategy
from agentspec.speculation.stride import RunningMean, os3
from agentspec.types import Delta, GenerateRequest

if TYPE_CHECKING:
    from agentspec.backends.torch.stepwise import TorchSteps, VectorScan

WINDOW = 8  # the hit rate is estimated from so many searches
SLACK = 1e-4  # of probability: far more than the error of rounding to float32

BLOCK = 4096  # entries whose distances are computed together
CACHED = 4096  # entries that a request's cache holds
PREFETCH = 10  # entries after each one found that are cached: n of RaLMSpec

Prior = NDArray[np.float64]
Distances = NDArray[np.float64]
Entries = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """Entries [n] with their squared distances and tokens, nearest first; ties are ordered by entry id."""

    entries: Entries
    distances: Distances
    tokens: Values


class DatastoreSearch:
    """Exact search. A result depends only on its query, not on the other queries of the batch."""

    def __init__(self, store: Datastore, scan: VectorScan) -> None:
        self.store = store
        self._scan = scan

    def search(self, queries: Floats, count: int) -> list[Neighbours]:
        """The `count` nearest entries for each of `queries` [q, width], or all entries if there are fewer, in one pass.

        The scan only selects candidates; float64 distances between query and stored keys rank them.
        """
        candidates = self._scan.near(queries, count)
        return [self._exact(query, near, count) for query, near in zip(queries, candidates, strict=True)]

    def _exact(self, query: Floats, near: Entries, count: int) -> Neighbours:
        """Each row's distance is summed by itself: other keys never change it."""
        distances = list[Distances]()
        for start in range(0, len(near), BLOCK):
            differences = self.store.keys[near[start : start + BLOCK]].astype(np.float64) - query
            distances.append(np.square(differences, out=differences).sum(axis=1))
        return nearest(near, np.concatenate(distances), self.store.values[near], count)


class NeighbourCache:
    """A request's cache of the entries that its searches found and of the entries after each of them in the corpus.

    A text often continues as its neighbours did, so that the cache likely holds the next query's neighbours (RaLMSpec,
    Zhang et al. 2024, section 5.3). New entries evict the oldest.
    """

    def __init__(self, store: Datastore) -> None:
        self._store = store
        self._ahead = np.arange(PREFETCH + 1)
        self._entries = np.empty(0, np.int64)
        self._keys = np.empty((0, store.keys.shape[1]), np.float32)
        self._halves = np.empty(0, np.float32)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, found: Iterable[Neighbours]) -> None:
        """Add found entries, and the entries that follow each of them in the corpus."""
        wanted = np.concatenate([(each.entries[:, None] + self._ahead).ravel() for each in found])
        fresh = np.setdiff1d(wanted[wanted < len(self._store.values)], self._entries)
        keys = self._store.keys[fresh].astype(np.float32)
        halves = np.einsum("ij,ij->i", keys, keys) / 2
        self._entries = np.concatenate([self._entries, fresh])[-CACHED:]
        self._keys = np.concatenate([self._keys, keys])[-CACHED:]
        self._halves = np.concatenate([self._halves, halves])[-CACHED:]

    def search(self, query: Floats, count: int) -> Neighbours:
        """The `count` nearest cached entries by float32 distances; a search of the datastore verifies them later."""
        halves = self._halves - np.einsum("ij,j->i", self._keys, query)
        best = np.argpartition(halves, min(count, len(halves)) - 1)[:count]
        distances = 2 * halves[best].astype(np.float64) + float(np.square(query, dtype=np.float64).sum())
        return nearest(self._entries[best], distances, self._store.values[self._entries[best]], count)


def nearest(entries: Entries, distances: Distances, tokens: Values, count: int) -> Neighbours:
    """The first `count` entries, ordered by distance and then by entry id."""
    order = np.lexsort((entries, distances))[:count]
    return Neighbours(entries[order], distances[order], tokens[order])


@dataclass(frozen=True, slots=True)
class Mixture:
    """KNN-LM's distribution (Khandelwal et al. 2020, section 2).

    p(y) = weight * p_knn(y) + (1 - weight) * p_lm(y), where p_knn weighs neighbours by exp(-distance / temperature).
    """

    weight: float
    temperature: float

    def prior(self, logits: Floats) -> Prior:
        """log((1 - weight) * p_lm) [vocab]: the model's share alone."""
        shifted = logits.astype(np.float64)
        shifted -= shifted.max()
        shifted += np.log1p(-self.weight) - np.log(np.exp(shifted).sum())
        return shifted

    def scores(self, prior: Prior, neighbours: Neighbours) -> Floats:
        """log p [vocab], which the sampler uses like logits."""
        weights = np.exp((neighbours.distances[0] - neighbours.distances) / self.temperature)
        tokens, positions = np.unique(neighbours.tokens, return_inverse=True)
        shares = np.bincount(positions, weights / weights.sum())  # of each token, summed from the nearest neighbour on
        mixed = prior.copy()
        least = np.finfo(np.float64).tiny
        mixed[tokens] = np.logaddexp(mixed[tokens], np.log(self.weight) + np.log(np.maximum(shares, least)))
        return mixed.astype(np.float32)

    def decided(self, prior: Prior) -> int | None:
        """The likeliest token if no neighbours can change it, else None: they add at most `weight` to another token."""
        best = int(prior.argmax())
        if np.exp(prior[best]) <= self.weight:
            return None
        second = max(prior[:best].max(initial=-np.inf), prior[best + 1 :].max(initial=-np.inf))
        return best if np.exp(prior[best]) > np.exp(second) + self.weight + SLACK else None


@dataclass(slots=True)
class KnnStride:
    """OS3 (Zhang et al. 2024, section 4) with synchronous verification: the stride that verifies most queries a second.

    A search takes hardly longer for more queries. A batch's first wrong guess costs no further search: its token is
    drawn from what the search found. A stride of 1 is therefore sequential retrieval.
    """

    guess: RunningMean = field(default_factory=RunningMean)  # seconds from one guess to the next, with its forward
    search: RunningMean = field(default_factory=RunningMean)  # seconds
    verified: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))  # right guesses, of all

    @property
    def gamma(self) -> float:
        """Share of right guesses, estimated with one right and one wrong guess added."""
        return (1 + sum(right for right, _ in self.verified)) / (2 + sum(tried for _, tried in self.verified))

    def choose(self) -> int:
        if self.guess.value is None or self.search.value is None:
            return 1
        return os3(self.guess.value, self.search.value, self.gamma)


@dataclass(frozen=True, slots=True, eq=False)
class TokenGuess:
    """A token ahead of the verified text: the model's part of its distribution, the query, and the token drawn.

    `token` is None if the cache was empty or absent. `decided`: no neighbours can change the token.
    """

    prior: Prior
    query: Floats
    token: int | None
    decided: bool = False


@dataclass(slots=True)
class KnnCounters:
    """The fields of an answer's `KnnSpeculation`, counted as it is made."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    wrong: int = 0
    decided: int = 0
    queries: int = 0
    strides: list[int] = field(default_factory=list)
    model_seconds: float = 0.0
    guess_seconds: float = 0.0
    search_seconds: float = 0.0

    def summary(self) -> KnnSpeculation:
        counted: dict[str, Any] = {**asdict(self), "strides": tuple(self.strides)}
        return KnnSpeculation(**counted, searches=len(self.strides))


@dataclass(slots=True)
class KnnDecoder:
    """Decodes one answer, one forward or one search at a time. `cache` is None for sequential KNN-LM.

    No search is made for a token that the model alone decides (see `Mixture.decided`).
    """

    datastore: DatastoreSearch
    mixture: Mixture
    count: int
    cache: NeighbourCache | None = None
    stride: KnnStride = field(default_factory=KnnStride)
    counters: KnnCounters = field(default_factory=KnnCounters)
    _pending: list[TokenGuess] = field(default_factory=list)
    _known: int = 0
    _over: bool = False
    _since: float | None = None  # the end of the last guess or search

    def advance(self, steps: TorchSteps) -> list[int]:
        """Do the next forward or search, and return the tokens that this verified."""
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

    def _due(self) -> bool:
        """Whether the guesses have to be verified before the next guess."""
        if not self._pending:
            return False
        queries = sum(not guess.decided for guess in self._pending)
        return self._over or self._pending[-1].token is None or queries >= self.stride.choose()

    def _guess(self, steps: TorchSteps) -> TokenGuess:
        began = perf_counter()
        state = steps.advance()
        self.counters.steps += 1
        prior = self.mixture.prior(state.logits)
        self.counters.model_seconds += (forwarded := perf_counter()) - began
        if self.cache is None:
            return TokenGuess(prior, state.hidden, None)
        if steps.plain and (token := self.mixture.decided(prior)) is not None:
            return TokenGuess(prior, state.hidden, token, decided=True)
        token = None
        if len(self.cache):
            token = steps.draw(self.mixture.scores(prior, self.cache.search(state.hidden, self.count)))
        self.counters.guess_seconds += (now := perf_counter()) - forwarded
        if self._since is not None:
            self.stride.guess.add(now - self._since)
        self._since = now
        return TokenGuess(prior, state.hidden, token)

    def _verify(self, steps: TorchSteps) -> list[int]:
        """Draw every guessed token again, now with the datastore's neighbours, up to the first that differs."""
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
        self.stride.search.add(seconds)
        self.counters.search_seconds += seconds
        self.counters.queries += len(queries)
        self.counters.strides.append(len(queries))
        return found

    def _count(self, pending: Sequence[TokenGuess], tokens: Sequence[int]) -> None:
        """Count which of the verified guesses were right."""
        seen = list(zip(pending, tokens, strict=False))
        guessed = [guess.token == token for guess, token in seen if guess.token is not None and not guess.decided]
        self.counters.decided += sum(guess.decided for guess, _ in seen)
        self.counters.drafted += sum(guess.token is not None and not guess.decided for guess in pending)
        self.counters.accepted += sum(guessed)
        self.counters.wrong += len(guessed) - sum(guessed)
        if guessed:
            self.stride.verified.append((sum(guessed), len(guessed)))


if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend


@dataclass(slots=True)
class KnnBackend(Strategy[KnnLmSettings]):
    """Answers with the distribution of `base`, mixed with a datastore's, once `prepare` has loaded the datastore. The
    owner of `base` closes it.

    `request.speculation` says whether to guess neighbours; the answer is the same either way.
    """

    name: str
    settings: KnnLmSettings
    base: ModelRef
    _model: TorchBackend | None = None
    _datastore: DatastoreSearch | None = None

    @classmethod
    def open(cls, name: str, settings: KnnLmSettings, dependencies: Dependencies) -> KnnBackend:
        return cls(name, settings, dependencies.find(settings.base))

    async def prepare(self) -> list[str]:
        """Load the datastore onto the model's device, at 4 bytes a number."""
        model = self.base.backend
        if not is_local(model, "open_steps"):
            named = f"models.{self.name}: KNN-LM needs a local model: {self.base.model!r}"
            raise ConfigurationError(f'{named} is no backend of kind "torch"')
        try:
            store = Datastore.open(self.settings.datastore, fingerprint=model.fingerprint, model=self.base.model)
        except ConfigurationError as error:
            raise ConfigurationError(f"models.{self.name}: {error}") from error
        self._model, self._datastore = model, DatastoreSearch(store, await model.open_scan(store.keys))
        return []

    @property
    def capabilities(self) -> Capabilities:
        own = self.base.backend.capabilities
        return Capabilities(own.token_ids, own.continue_final, speculation=True, context_length=own.context_length)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Yield verified tokens; closing the iterator cancels the work.

        Raises `InvalidRequestError` as the base does, and for several choices or log-probabilities.
        """
        if self._model is None or self._datastore is None:
            raise NotReadyError(f"the datastore of {self.name!r} is not open yet")
        session = await self._model.open_steps(request)
        mixture = Mixture(self.settings.weight, self.settings.temperature)
        cache = NeighbourCache(self._datastore.store) if request.speculation else None
        decoder = KnnDecoder(self._datastore, mixture, self.settings.neighbours, cache)
        delta = Delta()
        while delta.finish_reason is None:
            if tokens := await session.run(decoder.advance):
                delta = session.tell(tokens)
                if delta.finish_reason is not None:
                    delta = replace(delta, speculation=decoder.counters.summary())
                yield delta
