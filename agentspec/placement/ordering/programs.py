"""What the calls of running programs have cost so far, and how long programs go on after each step.

A program is one run of a workflow: its calls share a session. Times are seconds of whatever clock the caller reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agentspec.placement.bounded import RecentlyUsed
from agentspec.placement.ordering.queue import Urgency

MOST_PROGRAMS = 1 << 16
MOST_STEPS = 1 << 14  # (workflow, step) pairs that are learned
MOST_CALLS = 1024  # of one program that are learned from, the first
IDLE = 300.0  # seconds without a call, also none under way, after which a program counts as over
HARDLY = 2.0  # mean deviations below the mean that hardly any value is
MEMORY = 64  # programs that a mean looks back on

StepName = tuple[str, str]


@dataclass(slots=True)
class Estimate:
    """A running mean and mean deviation: of the first samples all alike, later of about the last `MEMORY`."""

    mean: float = 0.0
    deviation: float = 0.0
    samples: int = 0

    @property
    def least(self) -> float:
        """What a value hardly falls below, if none is negative."""
        return max(0.0, self.mean - HARDLY * self.deviation)

    def observe(self, value: float) -> None:
        self.samples += 1
        rate = 1 / min(self.samples, MEMORY)
        if self.samples > 1:
            self.deviation += (abs(value - self.mean) - self.deviation) * rate
        self.mean += (value - self.mean) * rate


@dataclass(slots=True)
class Program:
    """One run of a workflow. `attained` is its service: the seconds that its calls have been served."""

    attained: float = 0.0
    waited: float = 0.0
    ended: float = -math.inf  # when the latest call that was served did
    latest: float = 0.0
    count: int = 0
    under_way: int = 0  # calls that wait or are being served
    calls: list[tuple[StepName, float, float]] = field(default_factory=list)
    """The step of each call, when it was sent, and what the program had waited before."""


class Programs:
    """Attained service by program (Autellix, arXiv 2502.13965) and the time that is left after a step, by history
    (HexGen-Flow, arXiv 2505.05286).

    A step without a name is known by its place in the program. A program's past is learned from once it is over, which
    `end` says, or once it was idle for `IDLE` seconds or `MOST_PROGRAMS` others came after it.
    """

    def __init__(self, most: int = MOST_PROGRAMS) -> None:
        self._running: RecentlyUsed[str, Program] = RecentlyUsed(most, self._learn)
        self._remaining: RecentlyUsed[StepName, Estimate] = RecentlyUsed(MOST_STEPS)

    def sent(self, session: str, workflow: str | None, step: str | None, at: float) -> None:
        """A call of the program begins to wait."""
        self._end_idle(at)
        program = self._running.get(session)
        if program is None:
            program = Program()
            self._running.put(session, program)
        program.count += 1
        program.under_way += 1
        program.latest = at
        if len(program.calls) < MOST_CALLS:
            program.calls.append(((workflow or "", step or _place(program.count)), at, program.waited))

    def forget(self, session: str, at: float) -> None:
        """Undo `sent` for the call that began to wait at `at`: it goes without having been served."""
        program = self._running.get(session)
        if program is None:
            return
        program.count -= 1
        program.under_way -= 1
        found = next((call for call in reversed(program.calls) if call[1] == at), None)
        if found is not None:
            program.calls.remove(found)
        if not program.count:
            self._running.pop(session)

    def served(self, session: str, *, waited: float, seconds: float, at: float) -> None:
        """A call of the program ended at `at`, after it had waited, and had been served for `seconds`."""
        program = self._running.get(session)
        if program is not None:
            program.under_way -= 1
            program.waited += waited
            program.attained += seconds
            program.ended = program.latest = at

    def end(self, session: str) -> None:
        """The program makes no further call."""
        if (program := self._running.pop(session)) is not None:
            self._learn(program)

    def attained(self, session: str | None) -> float:
        """Seconds that the calls of the program have been served; 0 for a new one."""
        program = self._running.get(session) if session else None
        return program.attained if program else 0.0

    def remaining(self, workflow: str | None, step: str | None) -> Estimate | None:
        """Seconds from a call of this step to the end of its program, without what it waits; None if never seen.

        A step that is new in its workflow is expected to take what the workflow's calls do on average.
        """
        name = workflow or ""
        return self._remaining.get((name, step or "")) or self._remaining.get((name, ""))

    def urgency(self, session: str | None, workflow: str | None, step: str | None, deadline: float | None) -> Urgency:
        """What an order needs to know of the latest call of the program, with `deadline` on the same clock."""
        program = (self._running.get(session) if session else None) or Program(count=1)
        attained = program.attained
        if deadline is None:
            return Urgency(attained)
        left = self.remaining(workflow, step or _place(program.count)) or Estimate()
        return Urgency(attained, deadline - left.mean, deadline - left.least)

    def _end_idle(self, now: float) -> None:
        """Programs are kept in the order of their latest calls, so that only the first need be looked at."""
        while (oldest := self._running.oldest()) is not None and oldest[1].latest < now - IDLE:
            session, program = oldest
            if program.under_way > 0:  # a long call: the program is looked at again later
                program.latest = now
                self._running.put(session, program)
            else:
                self.end(session)

    def _learn(self, program: Program) -> None:
        for (workflow, step), at, waited in program.calls:
            if at > program.ended:  # not served by now: what would be left after it is not known
                continue
            left = max(0.0, program.ended - at - (program.waited - waited))
            for name in {(workflow, step), (workflow, "")}:
                estimate = self._remaining.get(name)
                if estimate is None:
                    estimate = Estimate()
                    self._remaining.put(name, estimate)
                estimate.observe(left)


def _place(count: int) -> str:
    """The name of a program's call by its number: 1, 2, 3 to 4, 5 to 8 and so on are alike."""
    return f"#{(count - 1).bit_length()}"
