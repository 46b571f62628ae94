"""The drafters in best-of-N replays: agentspec's suffix cache, STAND's n-grams, and both together.

STAND is a prototype in plain Python: its drafts are exact, its times are upper bounds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import torch

from agentspec.backends.torch.drafters.base import MIN_PROBABILITY, make_draft
from agentspec.backends.torch.drafters.combined import merge
from agentspec.backends.torch.sampling.distribution import gumbel_noise, position_key
from agentspec.benchmarks.best_of_n.replay import Contender, SampledQuestion, TopTokens
from agentspec.cache import CacheRequest, SuffixCache
from agentspec.types import Draft

STAND = 6  # a draft source: the governor learns acceptance for each
LONGEST = 4  # tokens of an n-gram
KEPT = 10  # continuations of an n-gram
NOTHING = make_draft((), (), (), (), ())

Candidates = Sequence[tuple[int, float]]
Expand = Callable[[Sequence[int]], Candidates]
"""The candidates after a path of drafted tokens, best first, each with its probability there."""


class SuffixContender(Contender):
    """The token cache as the engine uses it: answers share finished answers."""

    def __init__(self, least: float = MIN_PROBABILITY) -> None:
        self._cache = SuffixCache.open()
        self._least = least
        self._count = 0

    def open(self, question: SampledQuestion) -> None:
        self._question = question
        self._count += 1
        self._requests: dict[int, CacheRequest] = {}

    def draft(self, choice: int, budget: int) -> Draft:
        return self._request(choice).draft(budget, self._least)

    def commit(self, choice: int, start: int, end: int) -> None:
        tokens = self._question.answers[choice].tokens[start:end]
        self._request(choice).extend(tokens)

    def close(self, choice: int) -> None:
        self._requests.pop(choice).close()

    def _request(self, choice: int) -> CacheRequest:
        if choice not in self._requests:
            name = f"question {self._count}"
            self._requests[choice] = self._cache.request(self._question.prompt, session=name)
        return self._requests[choice]


class NgramTable:
    """The averaged distributions seen after each n-gram of 1 to `LONGEST` tokens (STAND, Song et al. 2025)."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, ...], tuple[int, dict[int, float]]] = {}

    def learn(self, context: Sequence[int], seen: dict[int, float]) -> None:
        """Record that the model gave `seen`, probabilities by token, after `context`."""
        for length in range(1, min(LONGEST, len(context)) + 1):
            key = tuple(context[-length:])
            times, known = self._rows.get(key, (0, {}))
            mean = {token: chance * times / (times + 1) for token, chance in known.items()}
            for token, chance in seen.items():
                mean[token] = mean.get(token, 0.0) + chance / (times + 1)
            best = heapq.nlargest(KEPT, mean.items(), key=lambda pair: pair[1])
            self._rows[key] = times + 1, dict(best)

    def behind(self, context: Sequence[int]) -> dict[int, float]:
        """The distribution after the longest known n-gram at the end of `context`; empty if none is known."""
        for length in range(min(LONGEST, len(context)), 0, -1):
            if found := self._rows.get(tuple(context[-length:])):
                return found[1]
        return {}


class StandContender(Contender):
    """STAND's n-grams, learned from rows of logits, whose candidates are ranked with the sampler's own noise.

    Trees grow best-first by the candidates' probabilities.
    """

    def __init__(self) -> None:
        self.table = NgramTable()

    def open(self, question: SampledQuestion) -> None:
        self._question = question
        self._drawn: dict[tuple[int, int], dict[int, float]] = {}
        self._texts = [question.prompt.tolist() for _ in question.answers]
        for end in range(1, len(question.prompt)):
            self._learn(self._texts[0][max(0, end - LONGEST) : end], question.prompt_rows[end - 1 : end])

    def draft(self, choice: int, budget: int) -> Draft:
        text = self._texts[choice]
        return best_first(
            lambda path: self._candidates([*text[-LONGEST:], *path], len(text) + len(path), choice), budget, STAND
        )

    def commit(self, choice: int, start: int, end: int) -> None:
        text, answer = self._texts[choice], self._question.answers[choice]
        for at in range(start, end):
            self._learn(text[-LONGEST:], answer.rows[at : at + 1])
            text.append(int(answer.tokens[at]))

    def close(self, choice: int) -> None:
        return None

    def _learn(self, context: Sequence[int], row: TopTokens) -> None:
        chances = np.exp(row.logprobs[0]).tolist()
        self.table.learn(context, dict(zip(row.ids[0].tolist()[:KEPT], chances, strict=False)))

    def _candidates(self, context: Sequence[int], position: int, choice: int) -> Candidates:
        known = self.table.behind(context)
        if not known:
            return ()
        tokens = list(known)
        scores = np.log(np.fromiter(known.values(), dtype=np.float64) + 1e-12) / self._question.temperature
        scores = scores + self._noise(tokens, position, choice)
        weights = np.exp(scores)
        chances = weights / weights.sum()
        return [(tokens[i], float(chances[i])) for i in np.argsort(-scores, kind="stable")]

    def _noise(self, tokens: Sequence[int], position: int, choice: int) -> np.ndarray:
        """The noise that the sampler will add to the scores of `tokens` at `position`; computed once for each."""
        known = self._drawn.setdefault((choice, position), {})
        if fresh := [token for token in tokens if token not in known]:
            key = position_key(self._question.seed, choice, position)
            known.update(zip(fresh, gumbel_noise(key, torch.tensor(fresh)).tolist(), strict=True))
        return np.array([known[token] for token in tokens])


class MixedContender(Contender):
    """Merges the trees of several drafters, as the engine does; the replay keeps the likeliest nodes."""

    def __init__(self, *parts: Contender) -> None:
        self._parts = parts

    def open(self, question: SampledQuestion) -> None:
        for part in self._parts:
            part.open(question)

    def draft(self, choice: int, budget: int) -> Draft:
        merged = merge(part.draft(choice, budget) for part in self._parts)
        return NOTHING if merged is None else merged

    def commit(self, choice: int, start: int, end: int) -> None:
        for part in self._parts:
            part.commit(choice, start, end)

    def close(self, choice: int) -> None:
        for part in self._parts:
            part.close(choice)


def best_first(expand: Expand, budget: int, source: int) -> Draft:
    """The tree of the `budget` likeliest paths, by the product of the candidates' probabilities."""
    rows: list[tuple[int, int, float]] = []
    heap: list[tuple[float, int, int, tuple[int, ...]]] = []

    def offer(text: tuple[int, ...], node: int, chance: float) -> None:
        for token, own in expand(text):
            if chance * own >= MIN_PROBABILITY:
                heapq.heappush(heap, (-chance * own, node, token, text))

    offer((), -1, 1.0)
    while heap and len(rows) < budget:
        negative, parent, token, text = heapq.heappop(heap)
        rows.append((token, parent, -negative))
        offer((*text, token), len(rows) - 1, -negative)
    return _draft(rows, source)


def _draft(rows: Sequence[tuple[int, int, float]], source: int) -> Draft:
    if not rows:
        return NOTHING
    tokens, parents, chances = zip(*rows, strict=True)
    return make_draft(tokens, parents, chances, [0] * len(rows), [source] * len(rows))
