"""Sessions for small servers, and the ones that a simulation draws from them, with what it says that each takes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from agentspec.simulation.capacity import capacity
from agentspec.simulation.scenario import Scenario
from agentspec.simulation.session import SimulatedSession
from agentspec.simulation.simulate import Simulation
from agentspec.simulation.workload import CallShape, SessionShape

SHAPES = 40


@dataclass(slots=True)
class DrawnSession:
    """A session as it was drawn: when it arrives, its calls, the pauses between them, and its simulated seconds."""

    number: int
    arrives: float
    shape: SessionShape
    pauses: Sequence[float]
    simulated: float = 0.0


class _Recording(Simulation):
    """A simulation that notes its sessions."""

    def __init__(self, scenario: Scenario, shapes: Sequence[SessionShape]) -> None:
        super().__init__(scenario, shapes)
        self.drawn: dict[int, DrawnSession] = {}

    def _send(self, now: float, session: SimulatedSession) -> None:
        if session.number not in self.drawn:
            self.drawn[session.number] = DrawnSession(session.number, now, session.shape, session.pauses)
        super()._send(now, session)

    def _close(self, session: SimulatedSession) -> None:
        self.drawn[session.number].simulated = self.counts.session_seconds[-1]
        super()._close(session)


def simulated(scenario: Scenario, shapes: Sequence[SessionShape]) -> list[DrawnSession]:
    """The sessions of one run in order of arrival, with what the simulation says that each takes."""
    recording = _Recording(scenario.model_copy(update={"warm_up": 0.0}), shapes)
    recording.run()
    return sorted(recording.drawn.values(), key=lambda session: session.arrives)


def small_sessions(seed: int) -> list[SessionShape]:
    """Agents in miniature: two to five calls that each repeat all before them, short answers, pauses of seconds."""
    draws = random.Random(seed)
    return [_session(draws) for _ in range(SHAPES)]


def _session(draws: random.Random) -> SessionShape:
    prompt, before, calls = draws.randrange(60, 240), 0, []
    for number in range(draws.randrange(2, 6)):
        answer = draws.randrange(8, 32)
        pause = draws.uniform(0.3, 2.0) if number else None
        calls.append(CallShape(prompt, before, answer, pause))
        before = prompt + answer
        prompt = before + draws.randrange(16, 80)
    return SessionShape("small", (), tuple(calls))


def rate_for(load: float, scenario: Scenario, shapes: Sequence[SessionShape]) -> float:
    """Sessions a second that are `load` of what the servers of `scenario` sustain, placed by `least_loaded`."""
    return load * capacity(scenario.model_copy(update={"policy": "least_loaded"}), shapes)
