"""What a simulation counts."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import numpy as np

from agentspec.benchmarks.placement.session import SimulatedSession


class SimulationCounts:
    """Counts of one run. Sessions before the first `warm_up` are left out, but for deaths and what they cost."""

    def __init__(self, warm_up: int, block_tokens: int) -> None:
        self._warm_up, self._block_tokens = warm_up, block_tokens
        self.arrived_at, self.closed_at = array("d"), array("d")  # of all sessions, in the order of their ends
        self.session_seconds = array("d")
        self.first_token_seconds = array("f")
        self.deadlines = self.missed = 0
        self.missed_by_waiting = 0  # would have been in time if no call of theirs had waited: what an order can win
        self.prompt_tokens = self.hit_tokens = self.ideal_tokens = 0
        self.deaths = self.cut = self.retried = self.lost = 0
        self.handed_over = 0  # calls of sessions that a gateway sees for the first time and others have seen,
        self.agreed = 0  # and those of them that it sent where the session was
        self.events = 0
        self.seconds = 0.0
        self._seen: set[int] = set()

    def first_token(self, session: SimulatedSession, now: float) -> None:
        """A call begins to stream."""
        ideal = self._ideal(session)
        if session.number < self._warm_up:
            return
        self.first_token_seconds.append(now - session.sent)
        self.prompt_tokens += session.hit + session.work
        self.hit_tokens += session.hit
        self.ideal_tokens += ideal

    def closed(self, session: SimulatedSession, now: float) -> None:
        """A session has its last answer."""
        self.arrived_at.append(session.arrived)
        self.closed_at.append(now)
        if session.number < self._warm_up:
            return
        self.session_seconds.append(now - session.arrived)
        if session.deadline < float("inf"):
            self.deadlines += 1
            self.missed += now > session.deadline
            self.missed_by_waiting += session.deadline < now <= session.deadline + session.waited

    def open_at(self, when: float) -> int:
        """Sessions that had arrived by then and were not over."""
        arrived, closed = (np.count_nonzero(np.asarray(times) <= when) for times in (self.arrived_at, self.closed_at))
        return int(arrived - closed)

    def figures(self) -> Mapping[str, float]:
        """The figures by name: seconds at percentiles, shares, and counts."""
        sessions = np.percentile(np.array(self.session_seconds), (50, 95, 99)) if self.session_seconds else [0.0] * 3
        first = (
            np.percentile(np.array(self.first_token_seconds), (50, 95, 99)) if self.first_token_seconds else [0.0] * 3
        )
        return {
            **{f"session_p{p}": float(value) for p, value in zip((50, 95, 99), sessions, strict=True)},
            **{f"ttft_p{p}": float(value) for p, value in zip((50, 95, 99), first, strict=True)},
            "hits": self.hit_tokens / max(1, self.prompt_tokens),
            "hits_of_ideal": self.hit_tokens / max(1, self.ideal_tokens),
            "missed": self.missed / max(1, self.deadlines),
            "missed_by_waiting": self.missed_by_waiting / max(1, self.deadlines),
            "makespan": self.seconds,
            "sessions": len(self.session_seconds),
            "calls": len(self.first_token_seconds),
            "deaths": self.deaths,
            "cut": self.cut,
            "retried": self.retried,
            "lost": self.lost,
            "agreed": self.agreed / max(1, self.handed_over),
        }

    def _ideal(self, session: SimulatedSession) -> int:
        """Tokens of the prompt that one engine with room for everything would have had."""
        shape, seen = session.shape, self._seen
        if session.position:
            ideal = shape.shared_tokens + session.keep
        else:
            ideal = sum(tokens for key, tokens in shape.shared if key in seen)
            seen.update(key for key, _ in shape.shared)
        return min(ideal - ideal % self._block_tokens, session.hit + session.work - 1)
