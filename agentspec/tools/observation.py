"""What one turn of an agent teaches: it holds counts and no text but for short constants, and is stored as JSON."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from pydantic import TypeAdapter

from agentspec.errors import CacheFormatError
from agentspec.tools.history import Selector

if TYPE_CHECKING:
    from agentspec.tools.model import CallForecast

_MOST_OPEN = 64  # predictions of a session whose calls may still come
ANSWER = ""  # in place of a tool's name where the model made no call
FIRST, REPEATED = range(2)  # kinds of predictions, calibrated apart
_VERSION = 3


class ArgumentRule(NamedTuple):
    """A way to fill an argument: the value at `rank` of those that the selector finds.

    `fresh`: values that calls of the tool have had already do not count.
    """

    tool: str
    argument: str
    selector: Selector
    fresh: bool
    rank: int


class PredictionScore(NamedTuple):
    """A predicted call: its probability before calibration, the kind of prediction, and whether the call came."""

    probability: float
    kind: int
    hit: bool


class Outlook(NamedTuple):
    """What tells whether a call comes later: its tool, the last event, whether it was made before, and the rules that
    fill its arguments.
    """

    tool: str
    after: str
    again: bool
    rules: tuple[ArgumentRule, ...]


class LaterScore(NamedTuple):
    """Whether the call of an outlook came later.

    Each prediction is told once when it is made, as if the call never came, and once more, with `hit`, if it comes.
    """

    outlook: Outlook
    hit: bool


@dataclass(frozen=True, slots=True)
class TurnObservation:
    """One turn: the events before it, the calls made in it, and which rules would have filled their arguments.

    `promise` tells for each tool how good its best arguments looked (0 to 3, and -1 less that where it was not
    called), `forms` the names of arguments of each call, `sources` where the value of an argument was found, `scores`
    the predictions that were made, `seconds` what tools and turns took that were measured meanwhile, and `later` what
    became of predictions for later turns.
    """

    after: tuple[str, ...]
    first: str
    promise: tuple[tuple[str, int], ...]
    forms: tuple[tuple[str, tuple[str, ...]], ...]
    rules: tuple[tuple[ArgumentRule, bool], ...]
    sources: tuple[tuple[str, str, Selector], ...]
    scores: tuple[PredictionScore, ...]
    seconds: tuple[tuple[str, float], ...] = ()
    later: tuple[LaterScore, ...] = ()

    def to_json(self) -> str:
        return json.dumps({"version": _VERSION, **asdict(self)}, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> TurnObservation:
        """What `to_json` wrote. Raises `CacheFormatError` for anything else."""
        try:
            value = json.loads(text)
            if value["version"] != _VERSION:
                raise ValueError
            return _reader().validate_python(value)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise CacheFormatError("what was learned from a turn cannot be read") from None


@cache
def _reader() -> TypeAdapter[TurnObservation]:
    return TypeAdapter(TurnObservation)


class OpenForecast(NamedTuple):
    """A prediction that may come true until `ends`, in seconds."""

    identity: str
    outlook: Outlook
    ends: float


class OpenForecasts:
    """A session's predictions that may come true in a later turn. `age`: the most seconds that a result may wait."""

    def __init__(self, age: float) -> None:
        self._age = age
        self._open: deque[OpenForecast] = deque(maxlen=_MOST_OPEN)

    def settle(
        self, forecast: CallForecast, made: Collection[str], *, began: float, now: float, voids: bool
    ) -> tuple[LaterScore, ...]:
        """What a turn with the calls `made`, by identity, tells of its own predictions and of earlier ones.

        The turn `began` and ended at these seconds; it `voids` what was started before if it changes something.
        """
        earlier, self._open = self._open, deque(maxlen=_MOST_OPEN)
        came = [one for one in earlier if one.identity in made and now < one.ends and not voids]
        scores = [LaterScore(one.outlook, True) for one in came]
        if not voids:
            self._open.extend(one for one in earlier if one.identity not in made and now < one.ends)
        for one in forecast.predictions:
            if one.outlook is None:
                continue
            scores.append(LaterScore(one.outlook, False))
            if not voids and one.call.identity not in made:
                ends = began + self._age
                self._open.append(OpenForecast(one.call.identity, one.outlook, ends))
        return tuple(scores)
