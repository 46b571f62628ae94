"""How long chains should be, for the whole batch at once."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.vllm.step_cost import LIKELY, StepTimeModel, TrialSteps
from agentspec.speculation.governor import allocate_budget

Costs = Callable[[np.ndarray], np.ndarray]

MACHINES: dict[str, Costs] = {  # seconds of a step by its tokens
    "flat": lambda tokens: 0.01 + 0.0 * tokens,
    "a little for each token": lambda tokens: 0.01 + 0.0003 * tokens,
    "token by token": lambda tokens: 0.01 + 0.002 * tokens,
    "flat up to 64": lambda tokens: 0.01 + 0.0003 * np.maximum(0, tokens - 64),
}


@given(sizes=st.lists(st.integers(8, 264), min_size=1, max_size=40), noise=st.floats(0.0, 0.1), seed=st.integers(0, 99))
def test_steps_that_all_take_as_long_are_learned_so_in_whatever_order_they_come(
    sizes: list[int], noise: float, seed: int
) -> None:
    """The first step may be a large one, from which smaller ones are guessed, and later ones all small."""
    random = Random(seed)
    model = StepTimeModel()
    for tokens in [*sizes, *[8] * 20]:
        model.observe(tokens, 0.01 * (1.0 + noise * random.random()))
    assert model.seconds(8) == pytest.approx(0.01, rel=0.2)
    assert model.seconds(max(sizes)) < 1.5 * model.seconds(8)


class Drafts:
    """What may follow eight requests in each of many steps: now and then a copied passage, else little."""

    def __init__(self, random: Random, steps: int) -> None:
        self.steps = [[self._chain(random) for _ in range(8)] for _ in range(steps)]

    @staticmethod
    def _chain(random: Random) -> np.ndarray:
        return np.cumprod(np.full(random.randrange(33), 0.97 if random.random() < 0.3 else 0.5))

    def goodput(
        self, choose: Callable[[list[np.ndarray]], list[int]], machine: Costs, after: Callable[..., None]
    ) -> float:
        """Expected tokens a second of the second half. `after` is told each step, its size and its seconds."""
        gained = taken = 0.0
        for step, parts in enumerate(self.steps):
            counts = choose(parts)
            size = 8 + sum(counts)
            seconds = float(machine(np.array(size)))
            after(step, size, seconds)
            if 2 * step >= len(self.steps):
                gained += 8 + sum(float(part[:count].sum()) for part, count in zip(parts, counts, strict=True))
                taken += seconds
        return gained / taken


def learned_goodput(drafts: Drafts, machine: Costs, first: float, random: Random) -> float:
    """With a cost learned from steps of which the first two take `first` times as long as others of their size."""
    cost, trials = StepTimeModel(), TrialSteps()

    def choose(parts: list[np.ndarray]) -> list[int]:
        least = cost.least_acceptance(8)
        if trials.begin():
            return [int((part >= min(least, LIKELY)).sum()) for part in parts]
        return allocate_budget(
            [part[part >= least] for part in parts], 8, lambda more: np.interp(8 + more, *cost.curve)
        )

    def after(step: int, size: int, seconds: float) -> None:
        seen = seconds * random.lognormvariate(0, 0.05) * (first if step < 2 else 1.0)
        trials.measured(cost.seconds(size), seen)
        cost.observe(size, seen)

    return drafts.goodput(choose, machine, after)


@pytest.mark.parametrize("seeds", [[0], pytest.param([1, 2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("first", [1 / 3, 1.0, 3.0])
def test_whatever_the_first_steps_take_later_ones_draft_what_pays(name: str, first: float, seeds: list[int]) -> None:
    machine = MACHINES[name]
    for seed in seeds:
        drafts = Drafts(Random(seed), 300)
        best = drafts.goodput(
            lambda parts: allocate_budget(parts, 8, lambda more: machine(8 + more)), machine, lambda *_: None
        )
        assert learned_goodput(drafts, machine, first, Random(seed)) >= 0.8 * best
