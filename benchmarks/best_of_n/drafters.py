"""The drafters in best-of-N replays: agentspec's suffix cache, STAND's n-grams, Token Recycling, and mixtures.

STAND and Token Recycling are prototypes in plain Python: their drafts are exact, their times are upper bounds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from agentspec.backends.torch.drafters.base import MIN_PROBABILITY, make_draft
from agentspec.backends.torch.drafters.merged import merge
from agentspec.backends.torch.sampling.sampler import gumbel_noise, position_key
from agentspec.benchmarks.best_of_n.replay import Contender, SampledQuestion, TopTokens
from agentspec.cache import CacheRequest, SuffixCache
from agentspec.types import Draft

STAND, RECYCLING = 6, 7  # draft sources: the governor learns acceptance for each
LONGEST = 4  # tokens of an n-gram
KEPT = 10  # continuations of an n-gram
DEEPEST = 8  # tokens of a path in a fixed tree
WIDTH = 8  # continuations of a token in Token Recycling
NOTHING = make_draft((), (), (), (), ())

Order = Literal["likely", "sampled", "coupled"]
Candidates = Sequence[tuple[int, float]]
Expand = Callable[[Sequence[int]], Candidates]
"""The candidates after a path of drafted tokens, best first, each with its probability there."""
Ranks = tuple[int, ...]
"""A node of a fixed tree: the ranks of the candidates on the path to the node."""


class SuffixContender(Contender):
    """The token cache as the engine uses it: answers share finished answers and, if `live`, running answers too."""

    def __init__(self, least: float = MIN_PROBABILITY, *, live: bool = False) -> None:
        self._cache = SuffixCache.open()
        self._least, self._live = least, live
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
            self._requests[choice] = self._cache.request(
                self._question.prompt, session=name, group=name if self._live else None
            )
        return self._requests[choice]


class NgramTable:
    """The averaged distributions seen after each n-gram of 1 to `LONGEST` tokens (STAND, Song et al. 2025)."""

    def __init__(self) -> None:
        self._rows: dict[Ranks, tuple[int, dict[int, float]]] = {}

    def __len__(self) -> int:
        return len(self._rows)

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


class TableContender(Contender):
    """The base of STAND and Token Recycling, which both learn from rows of logits and draft trees.

    Without a `shape` trees grow best-first by the candidates' probabilities. `prompts` says whether the drafter also
    learns from the rows of prompts.
    """

    source: int

    def __init__(self, shape: TreeShape | None = None, *, prompts: bool = True) -> None:
        self.shape, self._prompts = shape, prompts

    def open(self, question: SampledQuestion) -> None:
        self.question = question
        self._texts = [question.prompt.tolist() for _ in question.answers]
        if self._prompts and len(question.prompt_rows):
            for end in range(1, len(question.prompt)):
                self.learn(self._texts[0][max(0, end - LONGEST) : end], question.prompt_rows[end - 1 : end])

    def draft(self, choice: int, budget: int) -> Draft:
        expand = self.expander(choice)
        return (
            fixed_tree(expand, self.shape, budget, self.source)
            if self.shape
            else best_first(expand, budget, self.source)
        )

    def commit(self, choice: int, start: int, end: int) -> None:
        text, answer = self._texts[choice], self.question.answers[choice]
        for at in range(start, end):
            self.learn(text[-LONGEST:], answer.rows[at : at + 1])
            text.append(int(answer.tokens[at]))

    def close(self, choice: int) -> None:
        return None

    def expander(self, choice: int) -> Expand:
        text = self._texts[choice]
        return lambda path: self.candidates([*text[-LONGEST:], *path], len(text) + len(path), choice)

    def learn(self, context: Sequence[int], row: TopTokens) -> None:
        raise NotImplementedError

    def candidates(self, context: Sequence[int], position: int, choice: int) -> Candidates:
        raise NotImplementedError


class StandContender(TableContender):
    """STAND: candidates `sampled` without replacement, `likely` by probability, or `coupled` to the sampler's noise."""

    source = STAND

    def __init__(self, order: Order = "likely", shape: TreeShape | None = None, *, prompts: bool = True) -> None:
        super().__init__(shape, prompts=prompts)
        self.order: Order = order
        self.table = NgramTable()
        self._random = np.random.default_rng(0)
        self._drawn: dict[tuple[int, int], dict[int, float]] = {}

    def open(self, question: SampledQuestion) -> None:
        super().open(question)
        self._drawn = {}

    def learn(self, context: Sequence[int], row: TopTokens) -> None:
        chances = np.exp(row.logprobs[0]).tolist()
        self.table.learn(context, dict(zip(row.ids[0].tolist()[:KEPT], chances, strict=False)))

    def candidates(self, context: Sequence[int], position: int, choice: int) -> Candidates:
        known = self.table.behind(context)
        if not known:
            return ()
        tokens = list(known)
        scores = np.log(np.fromiter(known.values(), dtype=np.float64) + 1e-12) / self.question.temperature
        rest = math.log(max(1e-12, 1.0 - sum(known.values()))) / self.question.temperature
        scores = scores + self._noise(tokens, position, choice)
        weights = np.exp(scores)
        chances = weights / (weights.sum() + (math.exp(rest) if self.order != "coupled" else 0.0))
        return [(tokens[i], float(chances[i])) for i in np.argsort(-scores, kind="stable")]

    def _noise(self, tokens: Sequence[int], position: int, choice: int) -> np.ndarray:
        if self.order == "sampled":
            return self._random.gumbel(size=len(tokens))
        return self._own_noise(tokens, position, choice) if self.order == "coupled" else np.zeros(len(tokens))

    def _own_noise(self, tokens: Sequence[int], position: int, choice: int) -> np.ndarray:
        """The noise that the sampler will add to the scores of `tokens` at `position`; computed once for each."""
        known = self._drawn.setdefault((choice, position), {})
        if fresh := [token for token in tokens if token not in known]:
            key = position_key(self.question.seed, choice, position)
            known.update(zip(fresh, gumbel_noise(key, torch.tensor(fresh)).tolist(), strict=True))
        return np.array([known[token] for token in tokens])


class RecyclingContender(TableContender):
    """Token Recycling (Luo et al. 2024): keeps for each token the model's latest candidates after that token."""

    source = RECYCLING

    def __init__(self, shape: TreeShape | None = None, *, prompts: bool = True) -> None:
        super().__init__(shape, prompts=prompts)
        self._behind: dict[int, list[int]] = {}

    def learn(self, context: Sequence[int], row: TopTokens) -> None:
        self._behind[context[-1]] = row.ids[0, :WIDTH].tolist()

    def candidates(self, context: Sequence[int], position: int, choice: int) -> Candidates:
        return [(token, 1.0 / (rank + 2)) for rank, token in enumerate(self._behind.get(context[-1], ()))]


class MixedContender(Contender):
    """Merges the trees of several drafters, as the engine does; the replay keeps the likeliest nodes."""

    def __init__(self, *parts: Contender) -> None:
        self._parts = parts

    def open(self, question: SampledQuestion) -> None:
        for part in self._parts:
            part.open(question)

    def draft(self, choice: int, budget: int) -> Draft:
        drafts = [draft for part in self._parts if len(draft := part.draft(choice, budget))]
        return merge(drafts) if drafts else NOTHING

    def commit(self, choice: int, start: int, end: int) -> None:
        for part in self._parts:
            part.commit(choice, start, end)

    def close(self, choice: int) -> None:
        for part in self._parts:
            part.close(choice)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A fixed tree: its nodes, parents first, each given by the ranks on its path, and how often each was accepted."""

    paths: Sequence[Ranks]
    rates: Sequence[float]


def learn_shape(questions: Sequence[SampledQuestion], contender: TableContender, most: int) -> TreeShape:
    """The `most` nodes that were accepted most often while all candidates were drafted, eight deep (as in STAND)."""
    paths = [path for question in questions for path in _accepted(question, contender)]
    counts = Counter(path[:end] for path in paths for end in range(1, len(path) + 1))
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1], len(pair[0]), pair[0]))[:most]
    return TreeShape([path for path, _ in ranked], [count / len(paths) for _, count in ranked])


def _accepted(question: SampledQuestion, contender: TableContender) -> Iterator[Ranks]:
    """Decode the answers one after another, and yield the accepted path of each step."""
    contender.open(question)
    for choice, answer in enumerate(question.answers):
        at = 0
        while at < len(answer.tokens):
            path = _followed(contender.expander(choice), answer.tokens[at : at + DEEPEST].tolist())
            end = min(at + len(path) + 1, len(answer.tokens))
            contender.commit(choice, at, end)
            at = end
            yield path


def _followed(expand: Expand, actual: Sequence[int]) -> Ranks:
    """The ranks of the candidates that are accepted if `actual` follows."""
    ranks: list[int] = []
    for depth, token in enumerate(actual):
        tokens = [candidate for candidate, _ in expand(actual[:depth])]
        if token not in tokens:
            break
        ranks.append(tokens.index(token))
    return tuple(ranks)


def fixed_tree(expand: Expand, shape: TreeShape, budget: int, source: int) -> Draft:
    """The first `budget` nodes of `shape` for which there are candidates."""
    texts: dict[Ranks, tuple[int, ...]] = {(): ()}
    places: dict[Ranks, int] = {(): -1}
    found: dict[Ranks, Candidates] = {}
    rows: list[tuple[int, int, float]] = []
    for path, rate in zip(shape.paths[:budget], shape.rates, strict=False):
        above, rank = path[:-1], path[-1]
        if above not in places:
            continue
        if above not in found:
            found[above] = expand(texts[above])
        if rank < len(found[above]):
            token = found[above][rank][0]
            texts[path], places[path] = (*texts[above], token), len(rows)
            rows.append((token, places[above], rate))
    return _draft(rows, source)


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
