"""Policies and orders compared on the same sessions, over several seeds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.benchmarks.placement.scenario import Order, Scenario
from agentspec.benchmarks.placement.simulate import Simulation
from agentspec.benchmarks.placement.workload import SessionShape

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """A policy and an order, with the figures of each seed."""

    policy: str
    order: Order
    figures: list[Mapping[str, float]] = field(default_factory=list)

    def median(self, figure: str) -> float:
        return statistics.median(one[figure] for one in self.figures)

    def total(self, figure: str) -> float:
        return sum(one[figure] for one in self.figures)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All variants of one scenario, and what simulating them cost."""

    scenario: Scenario
    seeds: int
    variants: Sequence[PolicyRun]
    events: int
    processor_seconds: float

    def data(self) -> dict[str, Any]:
        """All figures, as JSON."""
        shared = {"policy", "order", "seed"}
        return {
            "scenario": self.scenario.model_dump(mode="json", exclude=shared),
            "seeds": [self.scenario.seed + number for number in range(self.seeds)],
            "variants": [
                {"policy": one.policy, "order": one.order, "figures": [dict(each) for each in one.figures]}
                for one in self.variants
            ],
            "events": self.events,
            "processor_seconds": round(self.processor_seconds, 2),
        }


def compare(
    scenario: Scenario,
    shapes: Sequence[SessionShape],
    variants: Sequence[tuple[str, Order]],
    seeds: int,
    progress: Progress,
) -> Comparison:
    """Simulate each of `variants` with seeds from that of `scenario` on; every variant sees the same sessions."""
    compared = [PolicyRun(policy, order) for policy, order in variants]
    events, began = 0, time.process_time()
    for seed in range(scenario.seed, scenario.seed + seeds):
        for variant in compared:
            progress(f"{variant.policy}, {variant.order}, seed {seed}")
            change = {"policy": variant.policy, "order": variant.order, "seed": seed}
            counts = Simulation(scenario.model_copy(update=change), shapes).run()
            variant.figures.append(counts.figures())
            events += counts.events
    return Comparison(scenario, seeds, compared, events, time.process_time() - began)
