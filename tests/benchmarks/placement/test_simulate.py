"""The simulation against arithmetic, and what holds whatever is simulated."""

from __future__ import annotations

import pytest

from agentspec.benchmarks.placement.scenario import EngineCosts, Scenario
from agentspec.benchmarks.placement.simulate import Simulation
from agentspec.benchmarks.placement.workload import (
    CallShape,
    SessionShape,
)
from agentspec.placement import POLICIES

SMALL = EngineCosts(kv_tokens=20_000, max_running=8)


def _session(calls=4, shared=((7, 1024),), prompt=600, answer=40, workflow="flow"):
    """Each call reads all before it, its answer, and 200 tokens more."""
    shapes, before = [], 0
    for _ in range(calls):
        shapes.append(CallShape(prompt, before, answer))
        before, prompt = prompt + answer, prompt + answer + 200
    return SessionShape(workflow, shared, tuple(shapes))


SHAPES = [_session(), _session(7, answer=90), _session(2, (), 3000, workflow="other")]


def _run(shapes=SHAPES, **given):
    given = {"sessions": 120, "engines": 3, "rate": 1.0, "costs": SMALL, "warm_up": 0.0} | given
    return Simulation(Scenario(**given), shapes).run()


def _one_after_the_other():
    """An engine that reads one prompt at a time, in a tenth of a second, and nothing else."""
    costs = EngineCosts(max_batched_tokens=1000, step=0.01, prompt_token=9e-5, sequence=0.0, context_token=0.0)
    shape = SessionShape("", (), (CallShape(1000, 0, 1),))
    return Scenario(engines=1, policy="least_loaded", costs=costs), shape


def test_the_queue_of_an_engine_is_as_long_as_queueing_theory_says():
    """M/D/1, by the formula of Pollaczek and Khinchine."""
    scenario, shape = _one_after_the_other()
    service, load = 0.1, 0.7
    change = {"sessions": 6000, "rate": load / service, "warm_up": 0.0}
    counts = Simulation(scenario.model_copy(update=change), [shape]).run()
    mean = sum(counts.first_token_seconds) / len(counts.first_token_seconds)
    assert mean == pytest.approx(service * (1 + load / (2 * (1 - load))), rel=0.08)


@pytest.mark.parametrize("order", ["arrival", "deadline"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_session_ends_once_under_every_policy(policy, order):
    counts = _run(policy=policy, order=order, rate=2.0)
    calm = _run(policy="round_robin")
    figures = counts.figures()
    assert figures["sessions"] == 120
    assert figures["calls"] == calm.figures()["calls"]
    assert counts.hit_tokens <= counts.ideal_tokens <= counts.prompt_tokens
