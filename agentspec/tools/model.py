"""Predicts an agent's next calls from those that followed similar events, and says which are worth an early start."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from agentspec.speculation.governor import Calibration
from agentspec.tools.history import Selector, ToolCall, ToolHistory, canonical, usable

_UNSEEN = 0.03  # how often a prediction of which nothing is known comes true later
PER_TURN = 6  # tools that are started for one turn, at most
AT_ONCE = 8  # that run at the same time, at most
_COST = 0.25  # of a second of a tool that runs for nothing, in seconds of the agent's time
_OVERHEAD = 0.001  # seconds that a start costs besides the tool's own time
_UNKNOWN_TURN = 1.0  # seconds
_DEPTH = 3  # events before a turn that a call's name may depend on
MOST_PREDICTIONS = 8  # of a turn
_SELECTORS = 48  # of an argument that are tried, those that found most
_RANKS = 8  # values of a selector that are tried: agents read lists item by item
_VALUES = 12  # values of a selector that are looked at
_FORMS = 3  # sets of arguments of a tool that are tried
_WIDTH = 8  # partial argument sets that are tried while further arguments are added
_MOST_RULES = 400  # of a turn that are counted
_LEVELS = (0.05, 0.2, 0.5)  # between the levels of how good a tool's best arguments look
_AGAIN = 0.15  # before calibration: how much less likely the very same call is a second time
_FITS = 0.15  # how often a rule fills an argument of which nothing is known
_NEWEST = 0.2  # weight of the newest measured time
TURN = ""  # in place of a tool's name: the time of a model's turn

_MOST_OPEN = 64  # predictions of a session whose calls may still come
ANSWER = ""  # in place of a tool's name where the model made no call


class ArgumentRule(NamedTuple):
    """A way to fill an argument: the value at `rank` of those that the selector finds.

    `fresh`: values that calls of the tool have had already do not count.
    """

    tool: str
    argument: str
    selector: Selector
    fresh: bool
    rank: int


Outlook = tuple[str, str, bool, tuple[ArgumentRule, ...]]
"""What the chance of a later call depends on: its tool, the last event, whether the call was made before, and the rules
that fill its arguments."""


class OpenForecasts:
    """A session's predictions that may come true in a later turn. `age`: the most seconds that a result may wait."""

    def __init__(self, age: float) -> None:
        self._age = age
        self._open: deque[tuple[float, CallPrediction]] = deque(maxlen=_MOST_OPEN)  # with the end of each, in seconds

    def settle(
        self, forecast: CallForecast, made: Collection[str], *, began: float, now: float, voids: bool
    ) -> list[Outlook]:
        """The outlooks of earlier predictions that come true by a turn with the calls `made`, by identity.

        The turn `began` and ended at these seconds; it `voids` what was started before if it changes something.
        """
        if voids:
            self._open.clear()
            return []
        earlier = [(ends, one) for ends, one in self._open if now < ends]
        opened = [*earlier, *((began + self._age, one) for one in forecast.predictions)]
        self._open = deque((each for each in opened if each[1].call.identity not in made), maxlen=_MOST_OPEN)
        return [one.outlook for _, one in earlier if one.call.identity in made]


Candidate = tuple[float, ToolCall, tuple[ArgumentRule, ...]]
"""A call, its probability if its tool is called, and the rules that fill its arguments."""


@dataclass(frozen=True, slots=True)
class CallPrediction:
    """A call that may come, with its calibrated probability; `estimate` is that before calibration.

    `later` is the probability that it comes not in the next turn but after it, while a result would still be of use,
    and `outlook` what that was estimated from.
    """

    call: ToolCall
    probability: float
    estimate: float
    later: float
    outlook: Outlook


@dataclass(frozen=True, slots=True)
class CallForecast:
    """The predictions for one turn, most likely first, and how good each tool's best arguments look."""

    predictions: tuple[CallPrediction, ...]
    promise: tuple[tuple[str, int], ...]


class CallModel:
    """What was learned from the turns of one agent. Not thread-safe. The same observations make the same model."""

    def __init__(self) -> None:
        self._names = NextNames()
        self._rules = RuleRates()
        self._promise = RuleRates()
        self._forms: dict[str, dict[tuple[str, ...], int]] = {}
        self._selectors: dict[tuple[str, str], dict[Selector, int]] = {}
        self._sessions: dict[tuple[str, str, Selector], set[str]] = {}  # of constants: at most two
        self._later = RuleRates()
        self._calibration = Calibration()  # of calls that were made before and of others apart
        self.seconds: dict[str, float] = {}  # by tool, and of a model's turn

    def predict(self, history: ToolHistory, tools: Collection[str]) -> CallForecast:
        """The calls of `tools` that may be made in the next turn."""
        expected = self._names.probabilities(tuple(history.events))
        found = {tool: self._candidates(history, tool) for tool in expected if tool in tools}
        promise = {tool: _level(history, candidates) for tool, candidates in found.items()}
        weights = {
            tool: chance * self._lift(tool, promise[tool], chance) if tool in promise else chance
            for tool, chance in expected.items()
        }
        total = max(1.0, sum(weights.values()))
        predictions = [
            self._prediction(history, weights[tool] / total * chance, call, rules)
            for tool, candidates in found.items()
            for chance, call, rules in candidates
        ]
        predictions.sort(key=lambda one: -one.probability)
        return CallForecast(tuple(predictions[:MOST_PREDICTIONS]), tuple(promise.items()))

    def learn(
        self,
        history: ToolHistory,
        calls: Sequence[ToolCall],
        forecast: CallForecast,
        tools: Collection[str],
        session: str,
        later: Sequence[Outlook] = (),
    ) -> None:
        """Learn a turn of `session` that made `calls`. Of tools outside `tools` only the names count.

        `later` are the outlooks of earlier predictions that came true in this turn.
        """
        names, made = {call.name for call in calls}, {call.identity for call in calls}
        learned = [call for call in calls if call.name in tools]
        tried = [rule for call in learned for rule in self._tried(history, call)]  # before anything is counted
        self._names.add(tuple(history.events), calls[0].name if calls else ANSWER)
        for tool, level in forecast.promise:
            self._promise.add((tool, level), tool in names)
            self._promise.add(tool, tool in names)
        for call in learned:
            forms, form = self._forms.setdefault(call.name, {}), tuple(sorted(call.arguments))
            forms[form] = forms.get(form, 0) + 1
        for rule, hit in islice(tried, _MOST_RULES):
            self._rules.add(rule, hit)
        for call in learned:
            for source in _sources(history, call):
                self._add_source(*source, session)
        for one in forecast.predictions:
            self._calibration.observe([one.estimate], [one.outlook[2]], [one.call.identity in made])
            self._later.add(one.outlook, False)
        self._calibration.fade()
        for outlook in later:
            self._later.correct(outlook)

    def took(self, tool: str, seconds: float) -> None:
        """Learn how long a tool took, or a turn of the model."""
        known = self.seconds.get(tool, seconds)
        self.seconds[tool] = known + _NEWEST * (seconds - known)

    def _add_source(self, tool: str, argument: str, selector: Selector, session: str) -> None:
        if selector[0] == "constant":
            sessions = self._sessions.setdefault((tool, argument, selector), set())
            if len(sessions) < 2:
                sessions.add(session)
            if len(sessions) < 2:
                return  # one session's value may be its own: it is never tried in another
        known = self._selectors.setdefault((tool, argument), {})
        known[selector] = known.get(selector, 0) + 1
        if len(known) > 4 * _SELECTORS:
            self._selectors[tool, argument] = dict(_most(known, 2 * _SELECTORS))

    def _lift(self, tool: str, level: int, chance: float) -> float:
        """How much more often the tool is called when its arguments look this good."""
        return self._promise.rate((tool, level), chance, 4.0) / self._promise.rate(tool, chance, 4.0)

    def _prediction(
        self, history: ToolHistory, estimate: float, call: ToolCall, rules: tuple[ArgumentRule, ...]
    ) -> CallPrediction:
        again = call.identity in history.made
        last_event = history.events[-1] if history.events else ""
        outlook = call.name, last_event, again, rules
        estimate *= _AGAIN if again else 1.0
        later = min(1.0, self._later.rate(outlook, _UNSEEN, 3.0))
        return CallPrediction(call, self._calibration.corrected(estimate, again), estimate, later, outlook)

    def _candidates(self, history: ToolHistory, tool: str) -> list[Candidate]:
        """Calls of the tool, each with its probability if the tool is called."""
        forms = self._forms.get(tool, {})
        called = sum(forms.values())
        found: list[Candidate] = []
        for form, count in _most(forms, _FORMS):
            filled: list[tuple[float, dict[str, Any], tuple[ArgumentRule, ...]]] = [(count / called, {}, ())]
            for argument in form:
                values = self._values(history, tool, argument)
                longer = [
                    (p * q, {**known, argument: value}, (*rules, rule))
                    for p, known, rules in filled
                    for q, value, rule in values
                ]
                filled = sorted(longer, key=lambda one: -one[0])[:_WIDTH]
            found += [(chance, ToolCall(tool, arguments), rules) for chance, arguments, rules in filled]
        total = max(1.0, sum(chance for chance, *_ in found))
        return [(chance / total, call, rules) for chance, call, rules in found]

    def _values(self, history: ToolHistory, tool: str, argument: str) -> list[tuple[float, Any, ArgumentRule]]:
        """(probability, value, rule that found it) of the likeliest values of an argument."""
        best: dict[str, tuple[float, Any, ArgumentRule]] = {}
        for rule, key, value in self._applicable(history, tool, argument):
            chance = self._rules.rate(rule, _FITS, 2.0)
            if key not in best or chance > best[key][0]:
                best[key] = chance, value, rule
        return sorted(best.values(), key=lambda one: -one[0])[:_WIDTH]

    def _applicable(self, history: ToolHistory, tool: str, argument: str) -> Iterator[tuple[ArgumentRule, str, Any]]:
        """(rule, canonical value, value) of every rule that fills the argument here."""
        used = history.used(tool, argument)
        for selector, _ in _most(self._selectors.get((tool, argument), {}), _SELECTORS):
            found = history.found(selector, _VALUES)
            unused = [one for one in found if one[0] not in used]
            for fresh, values in ((False, found), (True, unused)):
                for rank, (key, value) in enumerate(values[:_RANKS]):
                    yield ArgumentRule(tool, argument, selector, fresh, rank), key, value

    def _tried(self, history: ToolHistory, call: ToolCall) -> Iterator[tuple[ArgumentRule, bool]]:
        """Every rule that applied to a call's arguments, and whether its value was the call's."""
        for argument, value in call.arguments.items():
            want = canonical(value)
            for rule, key, _ in self._applicable(history, call.name, argument):
                yield rule, key == want


def _sources(history: ToolHistory, call: ToolCall) -> Iterator[tuple[str, str, Selector]]:
    for argument, value in call.arguments.items():
        if usable(value):
            for selector in (*history.sources(value), ("constant", canonical(value))):
                yield call.name, argument, selector


def _level(history: ToolHistory, candidates: list[Candidate]) -> int:
    chances = (chance * (_AGAIN if call.identity in history.made else 1.0) for chance, call, _ in candidates)
    best = max(chances, default=0.0)
    return sum(best >= edge for edge in _LEVELS)


def _most(counts: dict[Any, int], most: int) -> list[tuple[Any, int]]:
    """The keys counted most; of equals those that came first."""
    return sorted(counts.items(), key=lambda one: -one[1])[:most]


def gain(probability: float, later: float, tool_seconds: float, turn_seconds: float) -> float:
    """The seconds to expect of a start `turn_seconds` before a turn ends: what it saves, less the weighted waste.

    A call that comes `later` saves all of its tool's seconds, since turns and tools run in between.
    """
    saved = probability * min(tool_seconds, turn_seconds) + later * tool_seconds
    return saved - max(0.0, 1.0 - probability - later) * tool_seconds * _COST


def worthwhile(predictions: Sequence[CallPrediction], seconds: Mapping[str, float]) -> list[CallPrediction]:
    """The predictions that pay, those that gain most first. Tools whose time was never measured are left out."""
    turn = seconds.get(TURN, _UNKNOWN_TURN)
    known = [one for one in predictions if one.call.name in seconds]
    gains = [(gain(one.probability, one.later, seconds[one.call.name], turn), one) for one in known]
    return [one for gained, one in sorted(gains, key=lambda pair: -pair[0]) if gained > _OVERHEAD]


class RuleRates:
    """For each key the share of tries that hit, drawn towards a prior where there were few."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, list[int]] = {}

    def add(self, key: Hashable, hit: bool) -> None:
        seen = self._counts.setdefault(key, [0, 0])
        seen[0] += hit
        seen[1] += 1

    def correct(self, key: Hashable) -> None:
        """A try that was counted without a hit has hit after all."""
        self._counts.setdefault(key, [0, 1])[0] += 1

    def rate(self, key: Hashable, prior: float, weight: float) -> float:
        """The rate, where `prior` counts for `weight` tries."""
        hits, tries = self._counts.get(key, (0, 0))
        return (hits + weight * prior) / (tries + weight)


class NextNames:
    """Which tool's call, or which answer, follows the last events: an n-gram model that backs off to fewer events."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, ...], dict[str, int]] = {}

    def add(self, after: Sequence[str], name: str) -> None:
        for context in _contexts(after):
            counts = self._counts.setdefault(context, {})
            counts[name] = counts.get(name, 0) + 1

    def probabilities(self, after: Sequence[str]) -> dict[str, float]:
        """The probability of each name seen so far, and of an answer; the rest is for tools never called."""
        names = {**self._counts.get((), {}), ANSWER: 0}
        estimate = dict.fromkeys(names, 1.0 / (len(names) + 1))
        for context in _contexts(after):
            counts = self._counts.get(context)
            if counts is None:
                break
            weight = len(counts)
            total = sum(counts.values()) + weight
            estimate = {name: (counts.get(name, 0) + weight * estimate[name]) / total for name in names}
        return estimate


def _contexts(after: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The last 0, 1, … events."""
    for length in range(min(_DEPTH, len(after)) + 1):
        yield tuple(after[len(after) - length :])
