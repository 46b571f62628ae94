"""Chooses how many draft tokens each step verifies: the number with the most expected tokens per second.

This maximises goodput as in TurboSpec (Liu et al. 2024): the expected tokens of a step, over all its requests, divided
by its cost. The cost of verification is fitted online, and each drafter's acceptance is calibrated by its outcomes.
Requests with a latency target first get the tokens they need to hold it (AdaServe, Li et al. 2025). The choice may be
zero, so that text that cannot be predicted is generated without drafts.
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
LIKELY = 0.5  # a trial with drafts verifies the nodes that are at least as likely
FADE = 0.998  # decay per round of what was learned, so that a source that was wrong is tried again


class Calibration:
    """Corrects predicted probabilities by observed acceptance, per source and range of probability, in decaying counts.

    Until it has seen enough observations itself, it relies on the calibration `above`, if there is one.
    """

    def __init__(self, fade: float = FADE, above: Calibration | None = None) -> None:
        self._fade = fade
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
            seen[0] *= self._fade
            seen[1] *= self._fade
            seen[2] *= self._fade


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
class LatencyGoal:
    """One answer's goal: from its first token on, a token every `seconds_per_token`."""

    seconds_per_token: float
    first_at: float | None = None

    def begin(self, now: float) -> None:
        """The answer's first token is there; later calls change nothing."""
        if self.first_at is None:
            self.first_at = now

    def required_tokens(self, tokens: int, now: float, step_seconds: float) -> float:
        """The tokens that a step of `step_seconds`, begun `now`, must add to an answer of `tokens` tokens to be on
        time at its end; 0 before the first token. All times are seconds of one clock.
        """
        if self.first_at is None:
            return 0.0
        return (now - self.first_at + step_seconds) / self.seconds_per_token - (tokens - 1)


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
        required_tokens: Sequence[float] = (),
    ) -> list[list[int]]:
        """For each request the draft nodes to verify, ascending; the ancestors of a chosen node are always chosen too.

        `acceptances[i]` are the probabilities, from `expectations`, that the nodes of request i's tree are accepted.
        Without drafts the step computes `tokens` tokens (at least one for each request) of `batch` sequences over
        `context` KV slots. `required_tokens` is as in `allocate_budget`. The choice maximises the expected tokens per
        second of all requests together. The time for reading prompts is left out, since it must be spent in any case.
        Now and then it is a trial, so that no wrong cost stands for good.
        """
        requests = len(acceptances)
        tokens, batch = tokens or requests, batch or requests
        reading = self.cost.seconds(tokens, context, batch) - self.cost.seconds(requests, context, batch)
        if (trial := self.cost.next_trial()) is not None:
            least = LIKELY if trial == "drafts" else 2.0
            return [[node for node, chance in enumerate(one) if chance >= least] for one in acceptances]
        counts = allocate_budget(
            acceptances,
            requests,
            lambda drafted: self.cost.many(tokens + drafted, context, batch) - reading,
            required_tokens,
        )
        return [best_nodes(acceptance, count) for acceptance, count in zip(acceptances, counts, strict=True)]

    def chunk(self, running: int, context: int, targets: Sequence[float] = ()) -> int:
        """How many prompt tokens a step may read next to `running` answers, which have `context` KV slots in all.

        The chunk is the largest with which the step takes no longer than `STALL` plain steps, nor than the shortest of
        `targets` (seconds a token) that a plain step meets; the others would only cost those who read. Chunked prefill
        as in Sarathi-Serve (Agrawal et al. 2024). Where no answer waits, a large chunk need only be brief.
        """
        limit, least = BRIEF, CHUNKS[0]
        if running:
            plain = self.cost.seconds(running, context, running)
            limit, least = min([STALL * plain, *(target for target in targets if target >= plain)]), CHUNKS[-1]
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
    acceptances: Sequence[Sequence[float]],
    requests: int,
    costs: Callable[[Counts], Floats],
    required_tokens: Sequence[float] = (),
) -> list[int]:
    """How many nodes of each draft to verify, so that the step's expected tokens per second are maximal.

    `acceptances[i]` are the probabilities that draft i's nodes are accepted, never above their parents'. A draft's most
    probable nodes are taken first, so that a taken node's parent is always taken too. `requests` is the number of
    requests in the step, each of which gains one token in any case; `costs` gives the seconds of a step by the number
    of nodes it verifies. Goodput as in TurboSpec (Liu et al. 2024).

    `required_tokens[i]` is the number of tokens that request i must gain in this step; at most 1 needs no draft nodes.
    These needs are served before goodput is maximised, the largest first (AdaServe, Li et al. 2025, Algorithm 1), but
    only as long as another node makes the request itself faster.
    """
    lengths = [len(acceptance) for acceptance in acceptances]
    if not sum(lengths):
        return lengths
    acceptance = np.concatenate([np.asarray(acceptance, dtype=np.float64) for acceptance in acceptances])
    order = np.argsort(-acceptance, kind="stable")
    owner = np.repeat(np.arange(len(acceptances)), lengths)
    seconds = costs(np.arange(len(order) + 1))
    needed = _needed(acceptance[order], owner[order], seconds, required_tokens)
    order = np.concatenate([order[needed], np.delete(order, needed)])
    gain = requests + np.concatenate(([0.0], np.cumsum(acceptance[order])))
    best = len(needed) + int(np.argmax((gain / seconds)[len(needed) :]))
    return [int(count) for count in np.bincount(owner[order[:best]], minlength=len(acceptances))]


def _needed(acceptance: Floats, owner: Counts, seconds: Floats, required_tokens: Sequence[float]) -> list[int]:
    """The nodes, as indices into the descending `acceptance`, that requests need to meet their `required_tokens`."""
    taken: list[int] = []
    for request in sorted(range(len(required_tokens)), key=lambda request: -required_tokens[request]):
        gain = 1.0
        for node in np.flatnonzero(owner == request) if required_tokens[request] > gain else ():
            slower = seconds[len(taken) + 1] / seconds[len(taken)]
            if gain >= required_tokens[request] or gain + acceptance[node] <= gain * slower:
                break
            gain += float(acceptance[node])
            taken.append(int(node))
    return taken


def best_nodes(acceptance: Sequence[float], count: int) -> list[int]:
    """The `count` most probable nodes of a draft, ascending."""
    return sorted(sorted(range(len(acceptance)), key=lambda node: (-acceptance[node], node))[:count])
