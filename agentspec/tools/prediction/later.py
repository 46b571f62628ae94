"""Which calls come later than in the next turn, but while a result that was started now would still be of use."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from agentspec.tools.prediction.observation import LaterScore, Outlook
from agentspec.tools.prediction.rates import RuleRates

if TYPE_CHECKING:
    from agentspec.tools.prediction.model import CallForecast

_MOST_OPEN = 64  # predictions of a session whose calls may still come
_UNSEEN = 0.03  # the rate of a tool of which nothing is known


class LaterRates:
    """How often calls of an outlook came later: by all of it, drawn towards what is known of less of it."""

    def __init__(self) -> None:
        self._rates = RuleRates()

    def add(self, outlook: Outlook, hit: bool) -> None:
        """Count a prediction without a hit, or the hit of one that was counted."""
        for key in _keys(outlook):
            if hit:
                self._rates.correct(key)
            else:
                self._rates.add(key, False)

    def rate(self, outlook: Outlook) -> float:
        rate = _UNSEEN
        for key in _keys(outlook):
            rate = min(1.0, self._rates.rate(key, rate, 3.0))
        return rate


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


def _keys(outlook: Outlook) -> Iterator[Hashable]:
    """From the least that is known to all of it."""
    yield outlook.tool
    yield outlook.tool, outlook.after, outlook.again
    yield outlook.tool, outlook.after, outlook.again, outlook.rules
