"""How many sessions a second a fleet can serve for good."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentspec.benchmarks.placement.scenario import Scenario
from agentspec.benchmarks.placement.simulate import Simulation
from agentspec.benchmarks.placement.workload import SessionShape

WINDOW = 20  # times what a session takes alone: so long sessions arrive in one trial,
LEAST_SESSIONS = 4000  # and at least so many
GROWTH = 0.03  # of those that arrive in its second half, so many more may be open at its end than at its middle
NOISE = 3.0  # beside three standard deviations of how many are open where nothing grows
PRECISION = 0.03
TRIAL = (
    40  # times the sessions of the scenario are as many as a trial needs: who asks for ten wants no minute of search
)
LEAST_EFFORT = 1 / 8  # of all the sessions above
MOST_ENGINES = 10  # that are simulated; more have as much capacity each


def capacity(scenario: Scenario, shapes: Sequence[SessionShape]) -> float:
    """Sessions a second that `scenario` sustains: the highest rate at which the open ones do not grow.

    Found by bisection to 3 %, on at most ten engines and without deaths; the rate of `scenario` does not matter. For
    fewer than a hundred sessions the trials are shorter, and the capacity of them may come out a fifth too high.
    """
    engines = min(scenario.engines, MOST_ENGINES)
    tried = scenario.model_copy(update={"engines": engines, "kill_every": 0.0, "warm_up": 0.0})
    alone = sum(_alone(shape, scenario) for shape in shapes) / len(shapes)
    low, high = 0.0, engines / alone
    effort = min(1.0, max(LEAST_EFFORT, TRIAL * scenario.sessions / LEAST_SESSIONS))
    while sustains(tried, shapes, high, WINDOW * alone, effort):
        low, high = high, 2 * high
    while high > (1 + PRECISION) * low:
        middle = (low + high) / 2
        low, high = (middle, high) if sustains(tried, shapes, middle, WINDOW * alone, effort) else (low, middle)
    return low * scenario.engines / engines


def sustains(
    scenario: Scenario, shapes: Sequence[SessionShape], rate: float, seconds: float, effort: float = 1.0
) -> bool:
    """Whether the open sessions stay as many while sessions arrive at `rate` for `seconds` or longer.

    An `effort` below 1 is so much shorter a trial.
    """
    sessions = math.ceil(effort * max(LEAST_SESSIONS, rate * seconds))
    counts = Simulation(scenario.model_copy(update={"rate": rate, "sessions": sessions}), shapes).run()
    end = max(counts.arrived_at)
    middle, last = counts.open_at(end / 2), counts.open_at(end)
    return last - middle <= GROWTH * sessions / 2 + NOISE * math.sqrt(middle)


def _alone(shape: SessionShape, scenario: Scenario) -> float:
    """Seconds of a session on an idle engine, with pauses as they are drawn on average."""
    drawn = scenario.pause * math.exp(scenario.pause_spread**2 / 2)
    pauses = [drawn if call.pause is None else call.pause for call in shape.calls[1:]]
    return sum(scenario.costs.alone(call.prompt - call.keep, call.answer) for call in shape.calls) + sum(pauses)
