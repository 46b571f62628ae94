"""The governor against exhaustive search, synthetic costs and changing acceptance."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentspec.speculation.cost import CostCurve, CostModel, Floats
from agentspec.speculation.governor import (
    CHUNKS,
    LARGE_CHUNKS,
    LIKELY,
    MOST_STEPS,
    MOST_TENANTS,
    STALL,
    Governor,
    RequestStats,
    allocate_budget,
)
from agentspec.types import DEFAULT_TENANT

SIZES = (1, 2, 4, 8, 16, 32, 48)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Path probabilities that never grow along a path, and parents."""
    chances: list[float] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, 48))):
        parent = draw(st.integers(-1, node - 1))
        above = chances[parent] if parent >= 0 else 1.0
        chances.append(above * draw(st.sampled_from([1.0, 0.95, 0.8, 0.5, 0.2, 0.05])))
        parents.append(parent)
    return chances, parents


@st.composite
def cost_curves(draw: st.DrawFn) -> list[float]:
    """Seconds for 1..64 tokens: a fixed part, a slope, a step or two; never falling."""
    fixed, slope = draw(st.floats(0.001, 0.1)), draw(st.floats(0, 0.02))
    steps = draw(st.lists(st.tuples(st.integers(2, 48), st.floats(0, 0.2)), max_size=2))
    return [fixed * (1 + sum(extra for at, extra in steps if n >= at)) + slope * (n - 1) for n in range(1, 65)]


def exhaustive(worth: list[float], costs: list[float]) -> tuple[int, float]:
    rates = [(1 + sum(worth[:n])) / costs[n] for n in range(len(worth) + 1)]
    return max(range(len(rates)), key=lambda n: (rates[n], -n)), max(rates)


@given(st.lists(st.floats(0, 1), max_size=40), cost_curves())
def test_a_cut_is_the_exhaustive_optimum(worth: list[float], curve: list[float]) -> None:
    worth = sorted(worth, reverse=True)
    (count,) = allocate_budget([worth], 1, lambda drafted: np.array(curve)[drafted])
    assert (1 + math.fsum(worth[:count])) / curve[count] == pytest.approx(exhaustive(worth, curve)[1])


@given(st.lists(drafts(), min_size=1, max_size=3), cost_curves(), st.data())
def test_trees_of_a_batch_are_cut_to_the_best_goodput_of_all(
    batch: list[tuple[list[float], list[int]]], curve: list[float], data: st.DataObject
) -> None:
    """No subtrees of the same sizes or others give more expected tokens a second, and each is closed under parents."""
    governor = Governor()
    governor.cost.calibrate([(tokens, 0, curve[tokens - 1]) for tokens in SIZES])
    batch = [(chances[:12], parents[:12]) for chances, parents in batch]
    chosen = governor.choose([chances for chances, _ in batch], batch=1)
    for nodes, (_, parents) in zip(chosen, batch, strict=True):
        assert nodes == sorted(set(nodes))
        assert all(parents[node] < 0 or parents[node] in nodes for node in nodes)

    def goodput(counts: list[int]) -> float:
        best = [sorted(chances, reverse=True)[:count] for count, (chances, _) in zip(counts, batch, strict=True)]
        return (len(batch) + sum(map(sum, best))) / governor.cost.seconds(len(batch) + sum(counts))

    reached = goodput([len(nodes) for nodes in chosen])
    gained = sum(chances[node] for nodes, (chances, _) in zip(chosen, batch, strict=True) for node in nodes)
    assert reached == pytest.approx((len(batch) + gained) / governor.cost.seconds(len(batch) + sum(map(len, chosen))))
    for _ in range(30):
        assert reached >= goodput([data.draw(st.integers(0, len(c))) for c, _ in batch]) * (1 - 1e-9)


@given(st.lists(drafts(), min_size=1, max_size=3), st.floats(0, 1), st.integers(0, 4096))
def test_no_node_is_chosen_that_is_less_likely_than_pays_anywhere(
    batch: list[tuple[list[float], list[int]]], slope: float, slots: int
) -> None:
    """A node at that bound pays if the rest of the step is empty; trials find nodes whatever the costs seem to be."""
    governor, requests = Governor(), len(batch)
    governor.cost.calibrate([(tokens, 0, 0.01 * (1 + slope * (tokens - 1))) for tokens in SIZES])
    least = governor.least(requests, slots)
    chosen = governor.choose([chances for chances, _ in batch], context=slots)
    for nodes, (chances, _) in zip(chosen, batch, strict=True):
        assert all(chances[node] >= least * (1 - 1e-9) for node in nodes)
    for worth, pays in ((least * 1.001 + 1e-9, True), (least * 0.999 - 1e-9, False)) if least < LIKELY else ():
        first = governor.choose([[worth], *[[]] * (requests - 1)], context=slots)
        assert sum(map(len, first)) == pays
    step = governor.cost.seconds(requests, slots, requests)
    assert governor.least(requests, slots, 0.01 * step) == pytest.approx(min(LIKELY, least + 0.01 * requests))
    assert governor.least(requests, slots, step) == LIKELY


def test_chunks_of_prompts_keep_running_answers_running() -> None:
    governor = Governor()
    governor.cost.calibrate([(1, 0, 0.010), (512, 0, 0.010 + 511 * 0.001)])
    assert governor.chunk(0, 0) == CHUNKS[0]  # though it takes longer than a brief step
    size = governor.chunk(1, 0)
    assert governor.cost.seconds(1 + size) <= STALL * governor.cost.seconds(1) or size == CHUNKS[-1]
    governor.cost.calibrate([(1, 0, 0.010), (512, 0, 0.012)])
    assert governor.chunk(0, 0) == governor.chunk(4, 0) == LARGE_CHUNKS[0]


@pytest.mark.parametrize("seeds", [(1,), pytest.param((1, 2, 3), marks=pytest.mark.slow)])
def test_choices_for_batches_are_within_one_of_the_best_for_each_request_on_synthetic_machines(
    seeds: Sequence[int],
) -> None:
    """cost = 1 + slope * (tokens - 1) + each * (sequences - 1), learned from noisy steps of changing shape."""
    rngs, good, cases = {seed: random.Random(seed) for seed in seeds}, 0, 0
    for seed, slope, each in itertools.product(rngs, (0.005, 0.02, 0.1, 0.5), (0.0, 0.05, 0.2)):
        rng, model = rngs[seed], CostModel()

        def seconds(tokens: int, batch: int, slope: float = slope, each: float = each) -> float:
            return 0.02 * (1 + slope * (tokens - 1) + each * (batch - 1))

        noise = lambda rng=rng: math.exp(rng.gauss(0, 0.05))  # noqa: E731
        model.calibrate(
            [(size, 0, seconds(size, 1) * noise()) for size in SIZES for _ in range(3)],
            [(count, seconds(count, count) * noise()) for count in (4, 8) for _ in range(3)],
        )
        for _ in range(400):
            batch = rng.choice((1, 2, 4, 8))
            tokens = batch + rng.choice((0, 2, 8, 16, 24))
            model.observe(tokens, 0, seconds(tokens, batch) * noise(), batch)
        for batch in (2, 4, 8):
            for acceptance in (0.3, 0.6, 0.9):
                worths = [[acceptance ** (n + 1) for n in range(16)] for _ in range(batch)]
                count = sum(map(len, Governor(model).choose(worths)))
                pool = sorted((worth for each_worth in worths for worth in each_worth), reverse=True)
                rates = [(batch + sum(pool[:n])) / seconds(batch + n, batch) for n in range(len(pool) + 1)]
                best = max(range(len(rates)), key=lambda n: (rates[n], -n))
                good, cases = good + (abs(count - best) <= batch), cases + 1
    assert good >= 0.95 * cases


def test_acceptance_is_calibrated_for_each_workflow_step() -> None:
    """What is known of all steps together stands in for a step's own record until there is one."""
    governor = Governor()
    good, bad = governor.request_stats("flow/good"), governor.request_stats("flow/bad")
    for _ in range(60):
        governor.observe([0.5], [0], [True], good)
        governor.observe([0.5], [0], [False], bad)
    assert governor.expectations([0.5], [-1], [0], governor.request_stats("flow/good"))[0] > 0.8
    assert governor.expectations([0.5], [-1], [0], governor.request_stats("flow/bad"))[0] < 0.2
    known = governor.expectations([0.5], [-1], [0])[0]
    assert governor.expectations([0.5], [-1], [0], governor.request_stats("new"))[0] == pytest.approx(known)
    for index in range(2 * MOST_STEPS):
        governor.request_stats(str(index))
    assert len(governor.steps) == MOST_STEPS


@pytest.mark.parametrize("step", [None, "flow/shared"])
def test_acceptance_of_one_tenant_changes_nothing_for_another(step: str | None) -> None:
    """Not even under the same name of a step."""
    governor, fresh = Governor(), Governor()
    busy = governor.request_stats(step, "a")
    for _ in range(60):
        governor.observe([0.5], [0], [False], busy)
    for tenant in ("b", DEFAULT_TENANT):
        expected = [each.expectations([0.5], [-1], [0], each.request_stats(step, tenant)) for each in (governor, fresh)]
        assert expected[0] == expected[1]
    assert governor.expectations([0.5], [-1], [0], governor.request_stats(step, "a"))[0] < 0.2
    for index in range(2 * MOST_TENANTS):
        governor.request_stats(tenant=str(index))
    assert len(governor.tenants) == MOST_TENANTS


def learned(curve: list[float], rng: random.Random, *, rounds: int = 300, noise: float = 0.05) -> CostModel:
    """A cost model that saw a short calibration and many noisy rounds of a synthetic machine."""
    model = CostModel()

    def seconds(tokens: int) -> float:
        return curve[tokens - 1] * math.exp(rng.gauss(0, noise))

    model.calibrate([(tokens, 0, seconds(tokens)) for tokens in SIZES for _ in range(3)])
    for _ in range(rounds):
        tokens = rng.choice((1, 1, 1, 5, 9, 17, 33, 49))
        model.observe(tokens, 0, seconds(tokens))
    return model


def test_a_changed_cost_of_forwards_is_followed() -> None:
    """One that was flat becomes one whose tokens cost 10 % each, and back."""
    rng, flat, steep = random.Random(1), [0.02] * 64, [0.02 * (1 + 0.1 * n) for n in range(64)]
    model = learned(flat, rng)
    for curve in (steep, flat):
        for _ in range(400):
            tokens = rng.choice((1, 1, 1, 5, 9, 17, 33, 49))
            model.observe(tokens, 0, curve[tokens - 1] * math.exp(rng.gauss(0, 0.05)))
        for tokens in (9, 17, 49):
            assert model.seconds(tokens) / model.seconds(1) == pytest.approx(curve[tokens - 1] / curve[0], rel=0.25)


@given(cost_curves(), st.integers(0, 2**32))
def test_the_learned_curve_never_falls_and_stays_near_the_truth(curve: list[float], seed: int) -> None:
    model = learned(curve, random.Random(seed))
    estimates = [model.seconds(n) for n in range(1, 60)]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(estimates))
    for tokens in (1, 17, 49):
        assert model.seconds(tokens) == pytest.approx(curve[tokens - 1], rel=0.25)


TOKENS = np.arange(1, 1000)
forwards = st.tuples(st.integers(1, 30) | st.integers(1, 700), st.floats(-12, 3).map(math.exp))


def check_curve(costs: Floats) -> None:
    assert np.isfinite(costs).all() and (costs > 0).all()
    assert (np.diff(costs) >= -1e-9 * costs[1:]).all()


@example([(4, 1.0), (14, 1.0)], [(18, 8.0), (4, 4.0), (15, 8.0), (15, 1.0)])  # the mean that a line explained falls
@example([(18, 1.0)], [(4, 2.0), (22, 4.0), (27, 2.0), (4, 4.0), (23, 4.0)])  # the line was only assumed
@given(st.lists(forwards, min_size=1, max_size=4), st.lists(forwards, max_size=80))
def test_any_measurements_give_a_rising_positive_curve(
    calibrated: list[tuple[int, float]], seen: list[tuple[int, float]]
) -> None:
    curve = CostCurve(calibrated)
    for tokens, seconds in seen:
        curve.observe(tokens, seconds)
    check_curve(curve.many(TOKENS))


@given(st.lists(st.tuples(forwards, st.sampled_from([0, 1, 5000, 10**6]), st.integers(1, 30)), max_size=60))
def test_any_forwards_of_several_sequences_leave_costs_positive_and_rising(
    seen: list[tuple[tuple[int, float], int, int]],
) -> None:
    model = CostModel()
    for (tokens, seconds), context, batch in seen:
        model.observe(tokens * batch, context, seconds, batch)
    for context, batch in ((0, 1), (3000, 1), (10**6, 30)):
        check_curve(model.many(TOKENS, context, batch))


@given(st.integers(0, 2**32), st.sampled_from([0.0, 1e-3, 1e-2]))
def test_noise_is_not_taken_for_the_cost_of_context_until_tokens_cost_nothing(seed: int, slot: float) -> None:
    rng, model = random.Random(seed), CostModel()

    def seconds(tokens: int, context: int, batch: int) -> float:
        return 0.01 * (1 + 0.05 * (tokens - 1) + slot * context + 0.1 * (batch - 1)) * math.exp(rng.gauss(0, 0.2))

    model.calibrate([(tokens, slots, seconds(tokens, slots, 1)) for tokens in (1, 8, 32) for slots in (0, 500)])
    for _ in range(300):
        batch = rng.choice((1, 2, 4))
        tokens, context = batch + rng.choice((0, 0, 8, 16)), batch * rng.randint(20, 200)
        model.observe(tokens, context, seconds(tokens, context, batch), batch)
    assert model.seconds(1) >= 0.05 * 0.01


@pytest.mark.parametrize("claim", [0.9, 0.5])
def test_drafts_that_never_hit_cost_at_most_two_percent(claim: float) -> None:
    """A drafter that is always sure and always wrong, over two requests of 400 tokens each."""
    curve = [0.02 * (1 + 0.03 * n) for n in range(64)]
    governor, spent, off = Governor(), 0.0, 0.0
    governor.cost.calibrate([(size, 0, curve[size - 1]) for size in SIZES])
    for _ in range(2):
        pace = governor.request_stats()
        for _ in range(400):
            off += curve[0]
            worth = governor.expectations([claim] * 8, range(-1, 7), [0] * 8, pace)
            nodes = governor.choose([worth])[0] if pace.ask() else []
            seconds = curve[len(nodes)]
            spent += seconds
            governor.cost.observe(1 + len(nodes), 0, seconds)
            governor.observe([claim] * len(nodes), [0] * len(nodes), [False] * len(nodes), pace)
            pace.observe(sum(worth[node] for node in nodes), 0, 0.0, 0.0)
    assert spent <= 1.02 * off


LYING = {  # how much too slow a start was by tokens, context and sequences; the context and the requests at work
    "plain steps": (lambda tokens, context, batch: 10 if tokens == 1 else 1, 0, 1),
    "all steps": (lambda tokens, context, batch: 10, 3000, 1),
    "large steps": (lambda tokens, context, batch: tokens, 0, 1),
    "drafts over a long context": (lambda tokens, context, batch: 10 if context and tokens > 1 else 1, 3000, 1),
    "plain steps over a long context": (lambda tokens, context, batch: 10 if context and tokens == 1 else 1, 3000, 1),
    "all over a long context": (lambda tokens, context, batch: 10 if context else 1, 3000, 6),
    "several sequences": (lambda tokens, context, batch: 10 if batch > 1 else 1, 200, 6),
    "large steps too fast": (lambda tokens, context, batch: 1 / (1 + 0.05 * (tokens - 1)), 0, 1),
}


@pytest.mark.parametrize("chance", [0.9, 0.6, 0.02])
@pytest.mark.parametrize("name", LYING)
def test_a_clock_that_lies_at_the_start_costs_little_later(name: str, chance: float) -> None:
    """As where the machine is busy while a model is loaded: after 100 steps tokens come at most 10 % later."""
    lie, context, batch = LYING[name]
    worth = [chance ** (1 + node / 2) for node in range(16)]

    def seconds(tokens: int, context: int, batch: int) -> float:
        return 0.04 * (1 + 0.05 * (tokens - 1)) + (2e-6 + 1e-6 * tokens / batch) * context + 0.004 * (batch - 1)

    starts = [*((size, 0, 1) for size in SIZES), (1, 1024, 1), (16, 1024, 1), (4, 0, 4), (8, 0, 8)]
    times = {start: seconds(*start) * lie(*start) for start in starts}
    governor, spent, gained = Governor(), 0.0, 0.0
    governor.cost.calibrate(
        [(tokens, slots, times[tokens, slots, count]) for tokens, slots, count in starts if count == 1],
        [(count, times[count, 0, count]) for _, _, count in starts if count > 1],
    )
    for step in range(400):
        chosen = governor.choose([worth] * batch, context=batch * context)
        tokens = batch + sum(map(len, chosen))
        took = seconds(tokens, batch * context, batch)
        governor.cost.observe(tokens, batch * context, took, batch)
        if step >= 100:
            spent, gained = spent + took, gained + batch + sum(worth[node] for nodes in chosen for node in nodes)
    sure = itertools.accumulate(sorted(worth * batch, reverse=True), initial=batch)
    best = max(tokens / seconds(batch + drafted, batch * context, batch) for drafted, tokens in enumerate(sure))
    assert gained / spent >= 0.9 * best


def test_a_drafter_that_was_wrong_is_tried_again_when_it_is_right() -> None:
    curve = [0.02 * (1 + 0.02 * n) for n in range(64)]
    governor, pace, chosen = Governor(), RequestStats(), 0
    governor.cost.calibrate([(size, 0, curve[size - 1]) for size in SIZES])
    for step in range(600):
        right = step >= 200
        worth = governor.expectations([0.9] * 8, range(-1, 7), [0] * 8, pace)
        asked = pace.ask()
        nodes = governor.choose([worth])[0] if asked else []
        governor.cost.observe(1 + len(nodes), 0, curve[len(nodes)])
        governor.observe([0.9] * len(nodes), [0] * len(nodes), [right] * len(nodes), pace)
        if asked:
            accepted = len(nodes) * right
            pace.observe(sum(worth[node] for node in nodes), accepted, 0.0, accepted * curve[0])
        chosen += len(nodes) if step >= 500 else 0
    assert chosen >= 50 * 8
