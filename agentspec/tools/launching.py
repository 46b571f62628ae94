"""Which predictions are worth a start: where the time expected to be saved pays for the time expected to be wasted."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentspec.errors import ConfigurationError
from agentspec.tools.prediction.model import TURN, CallPrediction

_OVERHEAD = 0.001  # seconds that a start costs besides the tool's own time
_UNKNOWN_TURN = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class LaunchLimits:
    """`cost_weight` is what a second of a tool that runs for nothing costs, in seconds of the agent's time.

    At most `per_turn` tools are started for one turn, `per_minute` for one tenant, and `at_once` run at the same time
    in a process. Raises `ConfigurationError` for values that cannot be used.
    """

    cost_weight: float = 0.25
    per_turn: int = 6
    per_minute: int = 120
    at_once: int = 8

    def __post_init__(self) -> None:
        weight: object = self.cost_weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ConfigurationError(f"cost_weight must be a number of 0 or more, not {weight!r}", param="cost_weight")
        for name in ("per_turn", "per_minute", "at_once"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigurationError(f"{name} must be a whole number of 0 or more, not {value!r}", param=name)


def gain(probability: float, later: float, tool_seconds: float, turn_seconds: float, cost_weight: float) -> float:
    """The seconds to expect of a start `turn_seconds` before a turn ends: what it saves, less the weighted waste.

    A call that comes `later` saves all of its tool's seconds, since turns and tools run in between.
    """
    saved = probability * min(tool_seconds, turn_seconds) + later * tool_seconds
    return saved - max(0.0, 1.0 - probability - later) * tool_seconds * cost_weight


def pays(probability: float, later: float, tool_seconds: float, turn_seconds: float, cost_weight: float) -> bool:
    """Whether a tool should be started: whether its gain is worth it."""
    return gain(probability, later, tool_seconds, turn_seconds, cost_weight) > _OVERHEAD


def worthwhile(
    predictions: Sequence[CallPrediction], seconds: Mapping[str, float], cost_weight: float
) -> list[CallPrediction]:
    """The predictions that pay, those that gain most first. Tools whose time was never measured are left out."""
    turn = seconds.get(TURN, _UNKNOWN_TURN)

    def terms(one: CallPrediction) -> tuple[float, float, float, float, float]:
        return one.probability, one.later, seconds[one.call.name], turn, cost_weight

    known = [one for one in predictions if one.call.name in seconds]
    return sorted((one for one in known if pays(*terms(one))), key=lambda one: -gain(*terms(one)))


class LaunchBudget:
    """Counts starts per minute by tenant, and those that run. Thread-safe."""

    def __init__(self, limits: LaunchLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._recent: dict[str, deque[float]] = {}
        self._running = 0

    def take(self, tenant: str) -> bool:
        """Take a place for one start; false if there is none."""
        now = time.monotonic()
        with self._lock:
            recent = self._recent.setdefault(tenant, deque())
            while recent and recent[0] <= now - 60.0:
                recent.popleft()
            if len(recent) >= self._limits.per_minute or self._running >= self._limits.at_once:
                return False
            recent.append(now)
            self._running += 1
            self._forget_idle(now)
            return True

    def give_back(self) -> None:
        """A start has ended."""
        with self._lock:
            self._running -= 1

    def _forget_idle(self, now: float) -> None:
        if len(self._recent) > 1024:
            self._recent = {one: times for one, times in self._recent.items() if times and times[-1] > now - 60.0}
