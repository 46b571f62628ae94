"""Which predictions are worth a start: where the time expected to be saved pays for the time expected to be wasted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentspec.tools.prediction.model import TURN, CallPrediction

PER_TURN = 6  # tools that are started for one turn, at most
AT_ONCE = 8  # that run at the same time, at most
_COST = 0.25  # of a second of a tool that runs for nothing, in seconds of the agent's time
_OVERHEAD = 0.001  # seconds that a start costs besides the tool's own time
_UNKNOWN_TURN = 1.0  # seconds


def gain(probability: float, later: float, tool_seconds: float, turn_seconds: float) -> float:
    """The seconds to expect of a start `turn_seconds` before a turn ends: what it saves, less the weighted waste.

    A call that comes `later` saves all of its tool's seconds, since turns and tools run in between.
    """
    saved = probability * min(tool_seconds, turn_seconds) + later * tool_seconds
    return saved - max(0.0, 1.0 - probability - later) * tool_seconds * _COST


def pays(probability: float, later: float, tool_seconds: float, turn_seconds: float) -> bool:
    """Whether a tool should be started: whether its gain is worth it."""
    return gain(probability, later, tool_seconds, turn_seconds) > _OVERHEAD


def worthwhile(predictions: Sequence[CallPrediction], seconds: Mapping[str, float]) -> list[CallPrediction]:
    """The predictions that pay, those that gain most first. Tools whose time was never measured are left out."""
    turn = seconds.get(TURN, _UNKNOWN_TURN)

    def terms(one: CallPrediction) -> tuple[float, float, float, float]:
        return one.probability, one.later, seconds[one.call.name], turn

    known = [one for one in predictions if one.call.name in seconds]
    return sorted((one for one in known if pays(*terms(one))), key=lambda one: -gain(*terms(one)))
