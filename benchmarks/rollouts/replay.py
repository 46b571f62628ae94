"""Replays batches of rollouts side by side, teacher-forced, and computes their time by a measured cost of a forward.

A batch begins together and ends with its longest sample. In every step all samples that are not over draft, then all
commit what agrees with their recorded text and one token more. So the steps are those of an engine that draws the
recorded tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.engine_plugin.drafter import Goodput, shares
from agentspec.benchmarks.rollouts.drafters import Contender, Sample
from agentspec.benchmarks.rollouts.recording import Rollouts
from agentspec.cache.tokens import Tokens
from agentspec.recordings.replay import accepted_nodes
from agentspec.speculation.governor import allocate_budget, best_nodes
from agentspec.types import Draft

H200 = {1: 6.51, 2: 6.57, 4: 6.73, 8: 6.85, 16: 7.05, 32: 7.24, 64: 7.82}
"""Milliseconds of a forward by its tokens, over 512 slots: Llama 3 8b in bfloat16, one H200, `agentspec bench gpu`."""
PARTS = ("more than half running", "a half to a quarter", "less than a quarter")
LEAST = 0.1  # vLLM's suffix_decoding_min_token_prob
Cut = Literal["none", "followed", "chosen", "padded"]
Costs = Callable[[NDArray[np.int64]], NDArray[np.float64]]


def milliseconds(tokens: NDArray[np.int64] | int) -> NDArray[np.float64]:
    """The cost of a forward over so many tokens: linear between those measured, and beyond them as between the last."""
    sizes, cost = np.array(list(H200), dtype=np.float64), np.array(list(H200.values()))
    beyond = np.maximum(np.asarray(tokens) - sizes[-1], 0) * (cost[-1] - cost[-2]) / (sizes[-1] - sizes[-2])
    return np.asarray(np.interp(tokens, sizes, cost) + beyond)


@dataclass(frozen=True, slots=True)
class Plan:
    """How drafts are made: `budget` nodes at most, one chain or a tree, cut at each step by what else runs or not.

    "followed": as in vLLM's first runner, by the `Goodput` of recent steps; "chosen": for the highest expected goodput
    of the step, by the local engine's governor, and as vLLM's adaptive verification does; "padded": as many tokens of
    each sample are verified, whatever is drafted. With `alike` a token of each sample counts the same, though the batch
    ends with the slowest one. `schedule`: samples that run at most, and the budget then.
    """

    budget: int
    chain: bool = False
    cut: Cut = "none"
    alike: bool = False
    schedule: Sequence[tuple[int, int]] = ()

    def tokens(self, running: int) -> int:
        """The budget while so many samples run."""
        return next((count for most, count in self.schedule if running <= most), self.budget)


@dataclass(slots=True)
class Epoch:
    """The counts of one epoch; by the part of the batch that ran, and the milliseconds of each batch."""

    tokens: Counter[int] = field(default_factory=Counter)
    steps: Counter[int] = field(default_factory=Counter)
    nodes: int = 0
    cost: Counter[int] = field(default_factory=Counter)
    batches: list[float] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens.total() / self.steps.total()

    def data(self) -> dict[str, Any]:
        """All counts, those by part as lists."""
        by_part = {"tokens": self.tokens, "steps": self.steps, "milliseconds": self.cost}
        counts = {name: [several[part] for part in range(len(PARTS))] for name, several in by_part.items()}
        return {**counts, "drafted": self.nodes, "batches": self.batches}

    @property
    def nodes_per_step(self) -> float:
        return self.nodes / self.steps.total()

    def in_part(self, part: int) -> float:
        """Tokens per step while that part of a batch ran; nan if there was no such step."""
        return self.tokens[part] / self.steps[part] if self.steps[part] else float("nan")

    def rate(self, part: int) -> float:
        """Tokens per millisecond of that part."""
        return self.tokens[part] / self.cost[part] if self.cost[part] else float("nan")


@dataclass(slots=True)
class _Running:
    sample: Sample
    text: Tokens
    at: int = 0


def replay_epochs(
    rollouts: Sequence[Rollouts],
    drafter: Contender | None,
    plan: Plan,
    *,
    size: int,
    epochs: int,
    drifts: bool,
    batch: int,
) -> Iterator[Epoch]:
    """One epoch after another; between them the drafter learns of a new policy. Without a drafter: no drafts."""
    step, goodput = max(1, batch // size), Goodput()  # problems that run together
    for number in range(epochs):
        counts = Epoch()
        for first in range(0, len(rollouts), step):
            running = [
                _Running(drafter.begin(one) if drafter else _PLAIN, text)
                for one in rollouts[first : first + step]
                for text in one.epoch(number, size, drifts=drifts)
            ]
            _decode(running, plan if drafter else Plan(0), counts, goodput)
        yield counts
        if drafter:
            drafter.new_policy()


def _decode(running: list[_Running], plan: Plan, counts: Epoch, goodput: Goodput) -> None:
    begun, spent = len(running), 0.0
    while running:
        part = sum(len(running) <= begun * share for share in (0.5, 0.25))
        counted = shares([0 if plan.alike else one.at for one in running], [0])
        drafts, gained = _drafts(running, plan, goodput, counted), list[int]()
        for one, draft in zip(running, drafts, strict=True):
            right = int(accepted_nodes(draft, one.text[one.at :]).sum())
            fresh = one.text[one.at : one.at + right + 1]
            one.sample.extend(fresh)
            one.at += len(fresh)
            gained.append(len(fresh))
            if one.at == len(one.text):
                one.sample.close()
        padded = plan.cut == "padded"
        nodes = plan.tokens(len(running)) * len(running) if padded else sum(map(len, drafts))
        goodput.follow(gained, nodes, counted)
        counts.tokens[part] += sum(gained)
        took = float(milliseconds(len(running) + nodes))
        counts.steps[part] += len(running)
        counts.nodes += nodes
        counts.cost[part] += took  # type: ignore[assignment]  # a Counter adds floats too
        spent += took
        running = [one for one in running if one.at < len(one.text)]
    counts.batches.append(spent)


def _drafts(running: Sequence[_Running], plan: Plan, goodput: Goodput, counted: Sequence[float]) -> list[Draft]:
    floor = LEAST if plan.chain and plan.cut in ("none", "followed") else 0.0
    leasts = [max(floor, goodput.least(share)) if plan.cut == "followed" else floor for share in counted]
    drafts = [
        one.sample.draft(plan.tokens(len(running)), least, chain=plan.chain, actual=one.text[one.at :])
        for one, least in zip(running, leasts, strict=True)
    ]
    if plan.cut != "chosen":
        return drafts
    chances = [draft.probabilities.tolist() for draft in drafts]
    worth = [(share * draft.probabilities).tolist() for share, draft in zip(counted, drafts, strict=True)]
    counts = allocate_budget(worth, sum(counted), lambda nodes: milliseconds(len(running) + nodes))
    return [part_of(*cut) for cut in zip(drafts, map(best_nodes, chances, counts), strict=True)]


def part_of(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The tree made of `nodes`, ascending and closed under parents."""
    kept = np.asarray(nodes, dtype=np.int64)
    place = np.full(len(draft) + 1, -1, dtype=np.int32)  # the last entry stands for the parent -1
    place[kept] = np.arange(len(kept))
    return Draft(
        tokens=draft.tokens[kept],
        parents=place[draft.parents[kept]],
        probabilities=draft.probabilities[kept],
        match_length=draft.match_length[kept],
        source=draft.source[kept],
    )


class _Plain:
    """A sample without a drafter."""

    def draft(self, most: int, least: float, *, chain: bool, actual: Tokens) -> Draft:
        return NOTHING

    def extend(self, tokens: Tokens) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


_PLAIN = _Plain()
_NONE = np.empty(0, np.int32)
NOTHING = Draft(_NONE, _NONE, np.empty(0, np.float32), _NONE, np.empty(0, np.uint8))
