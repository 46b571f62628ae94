"""Plays recorded sessions in their order, each turn predicted from those before it, and learned afterwards."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, islice, takewhile
from typing import Any, Protocol

import numpy as np

from agentspec.benchmarks.agent_tools.clock import FIRST, PER_TOKEN, USER, NamedCall, ReplayedTurn
from agentspec.recordings.calls import RecordedCall
from agentspec.recordings.replay import replay_cache
from agentspec.recordings.traces import EncodedCall
from agentspec.tools.policy import ToolPolicy
from agentspec.tools.prediction.history import ToolCall, ToolHistory
from agentspec.tools.prediction.later import OpenForecasts
from agentspec.tools.prediction.model import CallForecast, CallModel, CallPrediction
from agentspec.tools.prediction.observation import LaterScore, calling

BUDGET = 8  # drafted tokens a step
_PIECE = re.compile(r"\w{1,4}|\W")


@dataclass(frozen=True, slots=True)
class DraftedAnswer:
    """How many pieces of an answer are written at the end of each step with drafts."""

    ends: tuple[int, ...]

    @classmethod
    def evenly(cls, text: str, tokens: int) -> DraftedAnswer:
        """One of this text, where each step writes so many tokens."""
        return cls(tuple(range(tokens, len(_PIECE.findall(text)) + tokens, tokens)))

    @property
    def steps_per_token(self) -> float:
        return len(self.ends) / max(1, self.ends[-1]) if self.ends else 0.0

    def share(self, text: str) -> float:
        """The share of the steps after which the answer begins with `text`."""
        return min(1.0, (bisect_left(self.ends, len(_PIECE.findall(text))) + 1) / len(self.ends))


def draft_steps(recorded: Sequence[RecordedCall]) -> list[DraftedAnswer]:
    """The steps that each answer takes with drafts, from an empty cache on."""
    ids: dict[str, int] = {}

    def encoded(text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.asarray([ids.setdefault(piece, len(ids)) for piece in _PIECE.findall(text)], dtype=np.int32)

    calls = [
        EncodedCall(
            one.labels.session or "", encoded("".join(map(text_of, one.messages))), encoded(text_of(one.answer))
        )
        for one in recorded
    ]
    done = replay_cache(calls, BUDGET)
    written = iter([int(nodes.sum()) + 1 for nodes in done.accepted])
    return [DraftedAnswer(tuple(accumulate(islice(written, steps)))) for steps in done.steps]


def play(
    recorded: Sequence[RecordedCall], drafted: Sequence[DraftedAnswer], read_only: Sequence[str], share: float
) -> list[list[ReplayedTurn]]:
    """The turns of all sessions, where tools have `share` of the time. `drafted` are those of `draft_steps`."""
    tokens = [len(text_of(call.answer)) / 4 for call in recorded]
    model_seconds = sum(
        FIRST + PER_TOKEN * length * one.steps_per_token for length, one in zip(tokens, drafted, strict=True)
    )
    waits = sum(any(True for _ in calls_of(call.answer)) for call in recorded)
    tool = share / (1.0 - share) * model_seconds / max(1, waits)
    model, played, sizes = CallModel(), [], iter(zip(tokens, drafted, strict=True))
    for session, calls in by_session(recorded):
        player = SessionPlayer(ModelLearner(model, session), Matching(read_only), tool)
        made = [list(calls_of(call.answer)) for call in calls]
        played.append([player.turn(call, *next(sizes), made[at:]) for at, call in enumerate(calls)])
    return played


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """How long a turn took, and by tool which share of that was left once its name was written."""

    seconds: float
    rests: Mapping[str, float]


def by_session(recorded: Iterable[RecordedCall]) -> Iterator[tuple[str, list[RecordedCall]]]:
    """(name, calls) of each session: calls in a row of one name, or without one that go on from each other."""
    calls: list[RecordedCall] = []
    number = 0
    for call in recorded:
        if calls and not _goes_on(calls[-1], call):
            yield calls[0].labels.session or f"unnamed {number}", calls
            calls, number = [], number + 1
        calls.append(call)
    if calls:
        yield calls[0].labels.session or f"unnamed {number}", calls


def _goes_on(before: RecordedCall, call: RecordedCall) -> bool:
    """Whether a call belongs to the session of the one before."""
    if call.labels.session or before.labels.session:
        return call.labels.session == before.labels.session
    known = len(before.messages)
    return len(call.messages) > known and list(call.messages[:known]) == list(before.messages)


class TurnLearner(Protocol):
    """Predicts the calls of a session's turns, and learns from them. `tools` are those that may run early.

    `predict_named` also gives the seconds that are left from the tool's name to the end of a turn, as far as learned.
    """

    def predict(self, history: ToolHistory, tools: Collection[str]) -> CallForecast: ...
    def predict_named(
        self, history: ToolHistory, forecast: CallForecast, tool: str
    ) -> tuple[list[CallPrediction], float]: ...
    def learn(
        self,
        history: ToolHistory,
        calls: Sequence[ToolCall],
        forecast: CallForecast,
        tools: Collection[str],
        later: Sequence[LaterScore],
        times: TurnTimes,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelLearner:
    """Lets one model learn from a session."""

    model: CallModel
    session: str

    def predict(self, history: ToolHistory, tools: Collection[str]) -> CallForecast:
        return self.model.predict(history, tools)

    def predict_named(
        self, history: ToolHistory, forecast: CallForecast, tool: str
    ) -> tuple[list[CallPrediction], float]:
        return self.model.predict_named(history, forecast, tool), self.model.seconds.get(calling(tool), 0.0)

    def learn(
        self,
        history: ToolHistory,
        calls: Sequence[ToolCall],
        forecast: CallForecast,
        tools: Collection[str],
        later: Sequence[LaterScore],
        times: TurnTimes,
    ) -> None:
        seconds = [(calling(tool), rest * times.seconds) for tool, rest in times.rests.items()]
        self.model.learn(self.model.observe(history, calls, forecast, tools, seconds, later), self.session)


class SessionPlayer:
    """Plays the turns of one session by a clock of its own, in which every tool takes `tool` seconds."""

    def __init__(self, learner: TurnLearner, tools: Matching, tool: float) -> None:
        self._learner, self._tools, self._tool = learner, tools, tool
        self._now = self._answered = 0.0
        self._seen = 0
        self._waiting: Iterator[str] = iter(())
        self._begin()

    def _begin(self) -> None:
        self._history, self._seen = ToolHistory(), 0
        self._open = OpenForecasts(ToolPolicy().max_age)

    def turn(
        self, recorded: RecordedCall, tokens: float, drafted: DraftedAnswer, upcoming: Iterable[Sequence[ToolCall]]
    ) -> ReplayedTurn:
        """One turn; `upcoming` are the calls of it and of those after it, which only say what could be foreseen."""
        if len(recorded.messages) < self._seen:  # its history was reset
            self._begin()
        new = [one for one in recorded.messages[self._seen :] if one.get("role") != "assistant"]
        for message in recorded.messages[self._seen :]:
            self._waiting = _hear(self._history, message, self._waiting)
        self._seen = len(recorded.messages)
        forecast = self._learner.predict(self._history, self._tools)
        calls = tuple(calls_of(recorded.answer))
        turn = ReplayedTurn(
            tokens,
            tokens * drafted.steps_per_token,
            calls,
            forecast,
            frozenset(call.identity for call in calls if call.name in self._tools),
            all(call.name in self._tools for call in calls),
            tuple(self._foreseeable(upcoming)),
            heard=sum(len(text_of(one)) for one in new) / 4,
            known=self._answered if any(one.get("role") == "tool" for one in new) else 0.0,
            named=tuple(self._named(recorded.answer, calls, forecast, drafted)),
        )
        self._answered = tokens
        self._learn(turn)
        return turn

    def _named(
        self, answer: Any, calls: Iterable[ToolCall], forecast: CallForecast, drafted: DraftedAnswer
    ) -> Iterator[NamedCall]:
        """The names of tools that may run early, each once, up to the first of another."""
        text, at, known = text_of(answer), 0, set[str]()
        for call in takewhile(lambda one: one.name in self._tools, calls):
            name = json.dumps(call.name)
            at = max(at, text.find(name, at)) + len(name)
            if call.name not in known:
                predictions, rest = self._learner.predict_named(self._history, forecast, call.name)
                yield NamedCall(call.name, drafted.share(text[:at]), tuple(predictions), rest)
            known.add(call.name)

    def _foreseeable(self, upcoming: Iterable[Sequence[ToolCall]]) -> Iterator[str]:
        """The read-only calls up to the next change of which all words and identifiers have been seen."""
        for calls in upcoming:
            if not all(call.name in self._tools for call in calls):
                return
            for call in calls:
                texts = [value for value in call.arguments.values() if isinstance(value, str)]
                if all(self._history.sources(text) for text in texts):
                    yield call.identity

    def _learn(self, turn: ReplayedTurn) -> None:
        began, self._now = self._now, self._now + turn.seconds
        made = {call.identity for call in turn.calls}
        forecast = turn.forecast.with_named([one for named in turn.named for one in named.predictions])
        later = self._open.settle(forecast, made, began=began, now=self._now, voids=not turn.only_reads)
        times = TurnTimes(turn.seconds, {one.tool: 1.0 - turn.seconds_until(one) / turn.seconds for one in turn.named})
        self._learner.learn(self._history, turn.calls, forecast, self._tools, later, times)
        self._now += self._tool if turn.calls else USER


class Matching(frozenset[str]):
    """The names that match one of the patterns, as a collection."""

    def __contains__(self, name: object) -> bool:
        return any(fnmatchcase(str(name), pattern) for pattern in self)


def _hear(history: ToolHistory, message: Any, waiting: Iterator[str]) -> Iterator[str]:
    """Tell the history a message; returns the names of tools whose results come next, in their order."""
    role, text = message.get("role"), message.get("content")
    text = text if isinstance(text, str) else json.dumps(text)
    if role == "tool":
        history.returns(next(waiting, "unknown"), text)
    elif role == "user":
        history.says(text)
    elif role == "assistant":
        calls = list(calls_of(message))
        for call in calls:
            history.makes(call)
        return iter([call.name for call in calls])
    else:
        history.reads(text)
    return waiting


def calls_of(message: Any) -> Iterator[ToolCall]:
    """The calls of an answer: in `tool_calls`, or each as a line of JSON in the text."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        yield from _call({"name": function.get("name"), "arguments": _parsed(function.get("arguments"))})
    text = message.get("content")
    for line in text.splitlines() if isinstance(text, str) else ():
        if line.startswith('{"name"'):
            yield from _call(_parsed(line))


def _call(value: Any) -> Iterator[ToolCall]:
    if isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("arguments"), dict):
        yield ToolCall(value["name"], value["arguments"])


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return None


def text_of(message: Any) -> str:
    """What a message says, calls in JSON."""
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content) if content else ""
    calls = message.get("tool_calls")
    return text + (json.dumps(calls) if calls else "")
