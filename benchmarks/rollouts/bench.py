"""The rollouts benchmark: tokens a step by epoch and in the tail, by drafter, and the computed time of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.cache.peer import installed_version
from agentspec.benchmarks.report import Figure, Progress
from agentspec.benchmarks.rollouts.drafters import Cached, Make, Oracle, Peer
from agentspec.benchmarks.rollouts.recording import read_rollouts
from agentspec.benchmarks.rollouts.replay import PARTS, Epoch, Plan, replay_epochs

OURS, ALONE, LAST = "agentspec", "agentspec, samples apart", "agentspec, present weights and one before"
PEER, ORACLE, NONE = "a tree for each prompt", "oracle", "no drafts"
ANYWHERE, MATCHED = f"{ORACLE}, from all prompts' texts", f"{ORACLE}, from longest matches"
DRAFTERS: dict[str, Make] = {OURS: Cached, PEER: Peer, ORACLE: Oracle}
AT_LEAST: dict[str, Make] = {
    ALONE: partial(Cached, grouped=False),
    LAST: partial(Cached, 1),
    MATCHED: partial(Oracle, longest=True),
}
"""Replayed with the smaller budget alone."""
CHAIN, TREE = "chains cut by recent goodput", "trees cut by expected goodput"
FIXED, FEWER, ADMITTED = "V2, 7 tokens each", "V2, fewer the more run", "V2, adaptive verification"
ALIKE = "all samples alike"
SCHEDULE = ((8, 7), (32, 3))  # and 1 above: `num_speculative_tokens_per_batch_size` of the guide
TIMED: dict[str, tuple[Make, Plan]] = {
    f"{OURS}, {CHAIN}": (Cached, Plan(15, chain=True, cut="followed")),
    f"{OURS}, {CHAIN}, {ALIKE}": (Cached, Plan(15, chain=True, cut="followed", alike=True)),
    f"{OURS}, {TREE}": (Cached, Plan(32, cut="chosen")),
    f"{OURS}, {TREE}, {ALIKE}": (Cached, Plan(32, cut="chosen", alike=True)),
    f"{OURS}, {FIXED}": (Cached, Plan(7, chain=True, cut="padded")),
    f"{OURS}, {FEWER}": (Cached, Plan(1, chain=True, cut="padded", schedule=SCHEDULE)),
    f"{OURS}, {ADMITTED}": (Cached, Plan(7, chain=True, cut="chosen", alike=True)),
    ORACLE: (Oracle, Plan(15)),
    ANYWHERE: (partial(Oracle, anywhere=True), Plan(15)),
}
POLICIES = {False: "one policy", True: "a policy that drifts"}


def run_rollouts(
    file: Path, *, size: int, epochs: int, budgets: Sequence[int], batch: int, progress: Progress
) -> RolloutReport:
    """Replay the recorded rollouts with all drafters, at `budgets` nodes a step. Raises `ConfigurationError`."""
    rollouts = read_rollouts(file, size, epochs)
    found = RolloutReport(len(rollouts), size, batch, installed_version())
    for drifts in POLICIES:
        replayed = partial(replay_epochs, rollouts, size=size, epochs=epochs, drifts=drifts, batch=batch)
        less = [(min(budgets), *one) for one in AT_LEAST.items()]
        for budget, name, make in [*((budget, *one) for budget, one in product(budgets, DRAFTERS.items())), *less]:
            if make is Peer and found.peer is None:
                continue
            progress(f"{POLICIES[drifts]}: {name} at {budget}")
            found.drafted[drifts, budget, name] = list(replayed(make(), Plan(budget)))
        found.timed[drifts, NONE] = list(replayed(None, Plan(0)))
        for name, (kind, plan) in TIMED.items():
            progress(f"{POLICIES[drifts]}: {name}")
            found.timed[drifts, name] = list(replayed(kind(), plan))
    return found


@dataclass(slots=True)
class RolloutReport:
    """Epochs by (whether the policy drifts, budget, drafter), and by (the same, way of drafting) with their times."""

    problems: int
    size: int
    batch: int
    peer: str | None
    drafted: dict[tuple[bool, int, str], list[Epoch]] = field(default_factory=dict)
    timed: dict[tuple[bool, str], list[Epoch]] = field(default_factory=dict)

    def goals(self) -> Iterator[Figure]:
        """From the second epoch on: tokens a step against the peer's, and the time of a batch against no drafts."""
        for drifts, policy in POLICIES.items():
            for budget in sorted({budget for _, budget, _ in self.drafted}):
                ratio = min(self._ratios(drifts, budget, PEER), default=None)
                bound = min(self._ratios(drifts, budget, PEER, ORACLE), default=None)
                note = f"the oracle: {bound:.2f}" if bound else ""
                name = f"{policy}: tokens/step vs {PEER}, at {budget}, the least epoch"
                yield Figure(name, ratio, "x", 1.3, at_most=False, note=note)
            for way in (CHAIN, TREE):
                name = f"{OURS}, {way}"
                note = f"oracles: {self.saved(drifts, ORACLE, 1):.2f}, {self.saved(drifts, ANYWHERE, 1):.2f}"
                makespan = f"{policy}: {way}, makespan, epoch 2"
                yield Figure(makespan, self.saved(drifts, name, 1), "x", 1.25, at_most=False, note=note)
                many = min(self._rates(drifts, name), default=None)
                yield Figure(f"{policy}: {way}, while most run, the least epoch", many, "x", 0.98, at_most=False)

    def _ratios(self, drifts: bool, budget: int, baseline: str, name: str = OURS) -> list[float]:
        """Of the second epoch and those after it."""
        theirs = self.drafted.get((drifts, budget, baseline), ())
        pairs = zip(self.drafted[drifts, budget, name], theirs, strict=False)
        return [one.tokens_per_step / other.tokens_per_step for one, other in list(pairs)[1:]]

    def saved(self, drifts: bool, name: str, epoch: int) -> float:
        """The mean time of a batch without drafts over that with them."""
        known, plain = (self.timed[drifts, one][epoch] for one in (name, NONE))
        return float(np.sum(plain.batches) / np.sum(known.batches))

    def _rates(self, drifts: bool, name: str) -> list[float]:
        pairs = zip(self.timed[drifts, name], self.timed[drifts, NONE], strict=True)
        return [one.rate(0) / plain.rate(0) for one, plain in pairs]

    def show(self) -> Iterator[RenderableType]:
        epochs = len(next(iter(self.timed.values())))
        numbers = [f"epoch {number + 1}" for number in range(epochs)]
        title = (
            f"Tokens a step: {self.problems} problems, {self.size} samples, {self.batch} at once; the peer: {self.peer}"
        )
        rows = [
            (POLICIES[drifts], str(budget), name, *(f"{one.tokens_per_step:.3f}" for one in several),
             f"{several[-1].nodes_per_step:.1f}", *(f"{several[-1].in_part(part):.2f}" for part in range(len(PARTS))))
            for (drifts, budget, name), several in self.drafted.items()
        ]  # fmt: skip
        columns = ("file", "budget", "drafter", *numbers, "drafted", *PARTS)
        yield report.table(title, columns, rows)
        timed = [
            (POLICIES[drifts], name, *(f"{self.saved(drifts, name, number):.3f}x" for number in range(epochs)),
             f"{min(self._rates(drifts, name)):.3f}x", f"{several[1].nodes_per_step:.1f}")
            for (drifts, name), several in self.timed.items()
        ]  # fmt: skip
        title = f"Computed time of a batch of {self.batch} without drafts, over that with them"
        yield report.table(title, ("file", "drafter", *numbers, "while most run", "drafted"), timed)
        cells = [(one.name, str(one), f"{one.required:g}", one.verdict, one.note) for one in self.goals()]
        yield report.table("Goals", ("figure", "measured", "required", "verdict", "note"), cells)

    def data(self) -> dict[str, Any]:
        """The counts of every epoch."""
        drafted = {f"{POLICIES[key[0]]}, {key[1]}, {key[2]}": value for key, value in self.drafted.items()}
        timed = {f"{POLICIES[key[0]]}, {key[1]}": value for key, value in self.timed.items()}
        several = {"tokens_per_step": drafted, "timed": timed}
        counts = {
            kind: {key: [epoch.data() for epoch in one] for key, one in some.items()} for kind, some in several.items()
        }
        return {"problems": self.problems, "samples": self.size, "batch": self.batch, "peer": self.peer, **counts}
