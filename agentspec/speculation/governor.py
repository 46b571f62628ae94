"""Chooses how many draft tokens each step verifies: the number with the most expected tokens per second.

This maximises goodput as in TurboSpec (Liu et al. 2024): the expected tokens of a step, over all its requests, divided
by its cost. The cost of verification is fitted online, and each drafter's acceptance is calibrated by its outcomes.
The choice may be zero, so that text that cannot be predicted is generated without drafts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from agentspec.speculation.cost import CostModel, Counts, Floats
from agentspec.types import DEFAULT_TENANT

K = TypeVar("K")

STALL = 8.0  # a step with a prompt chunk may take at most this many times as long as without it
LARGE_CHUNKS = (1024, 512)  # for a device that reads so many prompt tokens in one brief step, as GPUs do
BRIEF = 0.1  # seconds
CHUNKS = (256, 192, 128, 96, 64, 48, 32)  # prompt tokens that a step may read; smaller chunks waste its fixed cost

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
PRIOR = 6.0  # observations that a drafter's own probability counts for
REQUEST_FADE = 0.9  # decay per round of one request's record: short, since predictability changes within a text
LONGEST_PAUSE = 16  # most rounds in a row without asking the drafters
MOST_STEPS = 256  # workflow steps with a calibration of their own
MOST_TENANTS = 256  # likewise
LIKELY = 0.25  # a trial with drafts verifies the nodes that are at least as likely
FADE = 0.998  # decay per round of what was learned, so that a source that was wrong is tried again


class Calibration:
    """Corrects predicted probabilities by observed acceptance, per source and range of probability, in decaying counts.

    Until it has seen enough observations itself, it relies on the calibration `above`, if there is one.
    """

    def __init__(self, above: Calibration | None = None) -> None:
        self._above = above
        self._bins: dict[tuple[int, int], list[float]] = {}

    def corrected(self, probability: float, source: int) -> float:
        """The acceptance probability to expect when a drafter predicts `probability`."""
        believed = self._believed(probability, source)
        seen = self._bins.get((source, bisect_right(EDGES, probability)))
        if seen is None or seen[0] <= 0.0:
            return believed
        tried, hit, predicted = seen
        prior = PRIOR * predicted / tried
        return min(1.0, believed * (hit + prior) / (predicted + prior))

    def _believed(self, probability: float, source: int) -> float:
        return probability if self._above is None else self._above.corrected(probability, source)

    def observe(self, probabilities: Sequence[float], sources: Sequence[int], accepted: Sequence[bool]) -> None:
        """Learn from the nodes of one verified draft."""
        for probability, source, hit in zip(probabilities, sources, accepted, strict=True):
            seen = self._bins.setdefault((source, bisect_right(EDGES, probability)), [0.0, 0.0, 0.0])
            seen[0] += 1.0
            seen[1] += hit
            seen[2] += self._believed(probability, source)

    def fade(self) -> None:
        """Decay all counts by one round."""
        for seen in self._bins.values():
            seen[0] *= FADE
            seen[1] *= FADE
            seen[2] *= FADE


@dataclass(slots=True)
class RequestStats:
    """One request's record: how many draft tokens were accepted compared with the expectation, and whether asking the
    drafters pays at all. `calibration` is that of the request's workflow step, if it names one, `tenant` that of its
    tenant, if it is not the default one.
    """

    calibration: Calibration | None = None
    tenant: Calibration | None = None
    expected: float = 0.0
    accepted: float = 0.0
    balance: float = 0.0
    pause: int = 0
    skip: int = 0

    @property
    def factor(self) -> float:
        """The ratio of accepted to expected tokens; near 1 until there is evidence."""
        return (self.accepted + PRIOR / 2) / (self.expected + PRIOR / 2)

    def ask(self) -> bool:
        """Whether to ask the drafters this round. While asking does not pay, the pauses between grow longer."""
        self.skip -= 1
        return self.skip < 0

    def observe(self, expected: float, accepted: int, cost: float, saved: float) -> None:
        """Record a round in which the drafters were asked: tokens expected and accepted, drafting `cost` in seconds
        beyond `FREE`, and the seconds `saved` by accepted tokens. The cost of verifying rejected tokens is left out:
        `allocate_budget` weighs it, by means of `factor`.
        """
        self.expected = self.expected * REQUEST_FADE + expected
        self.accepted = self.accepted * REQUEST_FADE + accepted
        self.balance = self.balance * REQUEST_FADE + saved - cost
        self.pause = min(max(1, 2 * self.pause), LONGEST_PAUSE) if self.balance < 0 else 0
        self.skip = self.pause


@dataclass(slots=True)
class Governor:
    """Chooses the draft budgets of all requests of one engine. Not thread-safe.

    Tenants share the cost of a forward but no calibration: what is accepted tells of a tenant's text.
    """

    cost: CostModel = field(default_factory=CostModel)
    calibration: Calibration = field(default_factory=Calibration)
    steps: OrderedDict[tuple[str, str], Calibration] = field(default_factory=OrderedDict)
    tenants: OrderedDict[str, Calibration] = field(default_factory=OrderedDict)

    def request_stats(self, step: str | None = None, tenant: str = DEFAULT_TENANT) -> RequestStats:
        """A new record for one request of `tenant`, which belongs to the workflow step named `step` if any."""
        own = None if tenant == DEFAULT_TENANT else _recent(self.tenants, tenant, Calibration, MOST_TENANTS)
        if step is None:
            return RequestStats(tenant=own)
        above = own or self.calibration
        return RequestStats(_recent(self.steps, (tenant, step), lambda: Calibration(above=above), MOST_STEPS), own)

    def choose(
        self,
        acceptances: Sequence[Sequence[float]],
        *,
        tokens: int | None = None,
        context: int = 0,
        batch: int | None = None,
    ) -> list[list[int]]:
        """For each request the draft nodes to verify, ascending; the ancestors of a chosen node are always chosen too.

        `acceptances[i]` are the probabilities, from `expectations`, that the nodes of request i's tree are accepted.
        Without drafts the step computes `tokens` tokens (at least one for each request) of `batch` sequences over
        `context` KV slots. The choice maximises the expected tokens per second of all requests together. The time for
        reading prompts is left out, since it must be spent in any case. Now and then it is a trial, so that no wrong
        cost stands for good.
        """
        requests = len(acceptances)
        tokens, batch = tokens or requests, batch or requests
        reading = self.cost.seconds(tokens, context, batch) - self.cost.seconds(requests, context, batch)
        if (trial := self.cost.next_trial()) is not None:
            least = LIKELY if trial == "drafts" else 2.0
            return [[node for node, chance in enumerate(one) if chance >= least] for one in acceptances]
        counts = allocate_budget(
            acceptances, requests, lambda drafted: self.cost.many(tokens + drafted, context, batch) - reading
        )
        return [best_nodes(acceptance, count) for acceptance, count in zip(acceptances, counts, strict=True)]

    def least(self, requests: int, context: int = 0, seconds: float = 0.0) -> float:
        """The least acceptance with which a draft node pays, at any place in a step that draws for `requests` over
        `context` KV slots: what plain steps draw in the time of one more token, and in the `seconds` to draft it. At
        most `LIKELY`: a trial needs nodes to verify, or a cost that is wrong would stand.
        """
        alone, more = map(float, self.cost.many(np.array([requests, requests + 1]), context, requests))
        return min(LIKELY, requests * (more - alone + seconds) / alone)

    def chunk(self, running: int, context: int) -> int:
        """How many prompt tokens a step may read next to `running` answers, which have `context` KV slots in all.

        The chunk is the largest with which the step takes no longer than `STALL` plain steps: chunked prefill as in
        Sarathi-Serve (Agrawal et al. 2024). Where no answer waits, a large chunk need only be brief.
        """
        limit, least = BRIEF, CHUNKS[0]
        if running:
            limit, least = STALL * self.cost.seconds(running, context, running), CHUNKS[-1]
        sizes = (size for size in (*LARGE_CHUNKS, *CHUNKS) if size >= least)
        fits = (size for size in sizes if self.cost.seconds(running + size, context, running + 1) <= limit)
        return next(fits, least)

    def expectations(
        self,
        probabilities: Sequence[float],
        parents: Sequence[int],
        sources: Sequence[int],
        stats: RequestStats | None = None,
    ) -> list[float]:
        """The calibrated probability that each node of a draft is accepted; it never exceeds the parent node's."""
        factor = 1.0 if stats is None else min(stats.factor, 1.0)
        calibration = (stats and (stats.calibration or stats.tenant)) or self.calibration
        acceptance: list[float] = []
        for probability, parent, source in zip(probabilities, parents, sources, strict=True):
            own = calibration.corrected(probability, source) * factor
            acceptance.append(min(own, acceptance[parent]) if parent >= 0 else own)
        return acceptance

    def observe(
        self,
        probabilities: Sequence[float],
        sources: Sequence[int],
        accepted: Sequence[bool],
        stats: RequestStats | None = None,
    ) -> None:
        """Learn from the verified draft nodes of one request."""
        for calibration in (stats and stats.calibration, (stats and stats.tenant) or self.calibration):
            if calibration:
                calibration.fade()
                calibration.observe(probabilities, sources, accepted)


def _recent(known: OrderedDict[K, Calibration], key: K, new: Callable[[], Calibration], most: int) -> Calibration:
    """The calibration of `key`, a `new` one if need be; of more than `most` the one least recently asked for goes."""
    if key not in known:
        known[key] = new()
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
    return known[key]


def allocate_budget(
    acceptances: Sequence[Sequence[float]], requests: float, costs: Callable[[Counts], Floats]
) -> list[int]:
    """How many nodes of each draft to verify, so that the step's expected tokens per second are maximal.

    `acceptances[i]` are the probabilities that draft i's nodes are accepted, never above their parents'. A draft's most
    probable nodes are taken first, so that a taken node's parent is always taken too. `requests` is the number of
    requests in the step, each of which gains one token in any case; `costs` gives the seconds of a step by the number
    of nodes it verifies. Goodput as in TurboSpec (Liu et al. 2024).
    """
    lengths = [len(acceptance) for acceptance in acceptances]
    if not sum(lengths):
        return lengths
    acceptance = np.concatenate([np.asarray(acceptance, dtype=np.float64) for acceptance in acceptances])
    order = np.argsort(-acceptance, kind="stable")
    owner = np.repeat(np.arange(len(acceptances)), lengths)
    gain = requests + np.concatenate(([0.0], np.cumsum(acceptance[order])))
    best = int(np.argmax(gain / costs(np.arange(len(order) + 1))))
    return [int(count) for count in np.bincount(owner[order[:best]], minlength=len(acceptances))]


def best_nodes(acceptance: Sequence[float], count: int) -> list[int]:
    """The `count` most probable nodes of a draft, ascending."""
    return sorted(sorted(range(len(acceptance)), key=lambda node: (-acceptance[node], node))[:count])
