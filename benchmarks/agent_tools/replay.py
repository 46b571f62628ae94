"""Recorded sessions replayed in their order: which calls were predicted, and the time that early starts would save.

Nothing is learned from the future: each turn is predicted from the turns before it, of its own session and of earlier
ones. Times are computed, and every tool takes as long as makes tools the given share of the time without early starts.
The model's steps are those of a replay of the same file with drafts of the suffix cache, whose tokens are words and
pieces of words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.report import Progress, names_of
from agentspec.errors import ConfigurationError
from agentspec.recordings.calls import RecordedCall
from agentspec.recordings.formats import read
from agentspec.recordings.replay import EncodedCall, replay_cache
from agentspec.tools.history import ToolCall, ToolHistory
from agentspec.tools.model import AT_ONCE, PER_TURN, TURN, CallForecast, CallModel, OpenForecasts, worthwhile
from agentspec.tools.policy import ToolPolicy

READ_ONLY = ("get_*", "search_*", "find_*", "list_*")
USER = 10.0  # seconds
AGE = ToolPolicy().max_age
FIRST, PER_TOKEN = 0.3, 0.02  # seconds of a turn: to its first token, and for each step of the model


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """One turn: the tokens of its answer and the steps that they take with drafts, its calls, the forecast."""

    tokens: float
    steps: float
    calls: tuple[ToolCall, ...]
    forecast: CallForecast
    read_only: frozenset[str]  # identities of the calls that may run early
    only_reads: bool

    @property
    def seconds(self) -> float:
        """What the turn takes with drafts."""
        return FIRST + PER_TOKEN * self.steps

    @property
    def plain_seconds(self) -> float:
        """What it takes without."""
        return FIRST + PER_TOKEN * self.tokens

    @property
    def top(self) -> list[str]:
        """The identities of the predicted calls, most likely first."""
        return [one.call.identity for one in self.forecast.predictions]


Session = Sequence[ReplayedTurn]
Choose = Callable[[ReplayedTurn, Collection[str]], Iterable[str]]
"""The calls to start before a turn, by identity, given those that were started before."""


@dataclass(slots=True)
class SessionTimes:
    """Seconds of all sessions: `early` with early starts, `drafting` without, `plain` without drafts either.

    `starts` tools were started early, of which `used` results were used; the others ran `wasted` seconds.
    """

    plain: float = 0.0
    drafting: float = 0.0
    early: float = 0.0
    starts: int = 0
    used: int = 0
    wasted: float = 0.0
    turns: int = 0

    @property
    def speedup(self) -> float:
        """How many times less time sessions take by early starts."""
        return self.drafting / self.early


def tool_seconds(turns: Iterable[ReplayedTurn], share: float) -> float:
    """How long each tool takes where tools have this share of the time with drafts, without early starts."""
    turns = list(turns)
    waits = sum(bool(turn.calls) for turn in turns)
    return share / (1.0 - share) * sum(turn.seconds for turn in turns) / max(1, waits)


@dataclass(slots=True)
class _Started:
    """What was started in a session, by identity, with the time of its start."""

    tool: float
    calls: dict[str, float] = field(default_factory=dict)

    def start(self, wanted: Iterable[str], now: float) -> int:
        """Start what is wanted as far as there are places; returns how many were started."""
        self.calls = {one: at for one, at in self.calls.items() if now - at < AGE}
        places = AT_ONCE - sum(now - at < self.tool for at in self.calls.values())
        fresh = [one for one in wanted if one not in self.calls][: max(0, places)]
        self.calls.update(dict.fromkeys(fresh, now))
        return len(fresh)

    def wait(self, call: str, now: float) -> tuple[float, bool]:
        """(seconds until the call has its result, whether that of an early start is used)."""
        at = self.calls.get(call)
        if at is None or now - at >= AGE:
            return self.tool, False
        del self.calls[call]
        return max(0.0, self.tool - (now - at)), True


def session_times(sessions: Iterable[Session], tool: float, choose: Choose) -> SessionTimes:
    """What the sessions take where every tool takes `tool` seconds."""
    times = SessionTimes()
    for session in sessions:
        _run(session, _Started(tool), choose, times)
    times.wasted = (times.starts - times.used) * tool
    return times


def _run(session: Session, started: _Started, choose: Choose, times: SessionTimes) -> None:
    now = 0.0
    for turn in session:
        times.starts += started.start(choose(turn, started.calls), now)
        now += turn.seconds
        wait = _wait(turn, started, now, times)
        plain = started.tool if turn.calls else 0.0
        times.turns += 1
        times.plain += turn.plain_seconds + plain
        times.drafting += turn.seconds + plain
        times.early += turn.seconds + wait
        now += wait if turn.calls else USER


def _wait(turn: ReplayedTurn, started: _Started, now: float, times: SessionTimes) -> float:
    """The seconds for which the agent waits for the tools of a turn."""
    if not turn.only_reads:
        started.calls.clear()
    waits = [started.wait(call.identity, now) for call in turn.calls]
    times.used += sum(used for _, used in waits)
    return max((seconds for seconds, _ in waits), default=0.0)


def by_predictions(tool: float, turn_seconds: float) -> Choose:
    """Starts that pay by what was predicted."""

    def choose(turn: ReplayedTurn, started: Collection[str]) -> list[str]:
        known = {one.call.name: tool for one in turn.forecast.predictions} | {TURN: turn_seconds}
        fresh = [one for one in turn.forecast.predictions if one.call.identity not in started]
        return [one.call.identity for one in worthwhile(fresh, known)[:PER_TURN]]

    return choose


BUDGET = 8  # drafted tokens a step
_PIECE = re.compile(r"\w{1,4}|\W")


def draft_steps(recorded: Sequence[RecordedCall]) -> list[float]:
    """The steps that each answer takes with drafts for each of its tokens, from an empty cache on."""
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
    return [steps / max(1, sum(islice(written, steps))) for steps in done.steps]


def play(
    recorded: Sequence[RecordedCall], drafted: Sequence[float], read_only: Sequence[str], share: float
) -> list[list[ReplayedTurn]]:
    """The turns of all sessions, where tools have `share` of the time. `drafted` are those of `draft_steps`."""
    tokens = [len(text_of(call.answer)) / 4 for call in recorded]
    model_seconds = sum(FIRST + PER_TOKEN * length * steps for length, steps in zip(tokens, drafted, strict=True))
    waits = sum(any(True for _ in calls_of(call.answer)) for call in recorded)
    tool = share / (1.0 - share) * model_seconds / max(1, waits)
    model, played, sizes = CallModel(), [], iter(zip(tokens, drafted, strict=True))
    for session, calls in by_session(recorded):
        player = SessionPlayer(model, session, Matching(read_only), tool)
        played.append([player.turn(call, *next(sizes)) for call in calls])
    return played


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


class SessionPlayer:
    """Plays the turns of one session by a clock of its own, in which every tool takes `tool` seconds."""

    def __init__(self, model: CallModel, session: str, tools: Matching, tool: float) -> None:
        self._model, self._session, self._tools, self._tool = model, session, tools, tool
        self._now = 0.0
        self._seen = 0
        self._waiting: Iterator[str] = iter(())
        self._begin()

    def _begin(self) -> None:
        self._history, self._seen = ToolHistory(), 0
        self._open = OpenForecasts(ToolPolicy().max_age)

    def turn(self, recorded: RecordedCall, tokens: float, steps_per_token: float) -> ReplayedTurn:
        if len(recorded.messages) < self._seen:  # its history was reset
            self._begin()
        for message in recorded.messages[self._seen :]:
            self._waiting = _hear(self._history, message, self._waiting)
        self._seen = len(recorded.messages)
        forecast = self._model.predict(self._history, self._tools)
        calls = tuple(calls_of(recorded.answer))
        turn = ReplayedTurn(
            tokens,
            tokens * steps_per_token,
            calls,
            forecast,
            frozenset(call.identity for call in calls if call.name in self._tools),
            all(call.name in self._tools for call in calls),
        )
        self._learn(turn)
        return turn

    def _learn(self, turn: ReplayedTurn) -> None:
        began, self._now = self._now, self._now + turn.seconds
        made = {call.identity for call in turn.calls}
        later = self._open.settle(turn.forecast, made, began=began, now=self._now, voids=not turn.only_reads)
        self._model.learn(self._history, turn.calls, turn.forecast, self._tools, self._session, later)
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


@dataclass(slots=True)
class FileReplay:
    """The sessions of one file, where tools have `share` of the time."""

    name: str
    share: float
    sessions: list[list[ReplayedTurn]] = field(default_factory=list)

    @property
    def turns(self) -> list[ReplayedTurn]:
        return [turn for session in self.sessions for turn in session]

    def reads(self) -> Iterator[tuple[ReplayedTurn, str]]:
        """(turn, identity) of every call that may run early."""
        for turn in self.turns:
            for call in turn.calls:
                if call.identity in turn.read_only:
                    yield turn, call.identity

    def hit_rate(self, most: int) -> float:
        """The share of the read-only calls that are among the first `most` predictions before their turn."""
        found = [identity in turn.top[:most] for turn, identity in self.reads()]
        return sum(found) / max(1, len(found))

    @property
    def tool(self) -> float:
        """How many seconds each tool takes."""
        return tool_seconds(self.turns, self.share)

    def times(self) -> SessionTimes:
        """With the starts that the predictor makes."""
        turns, tool = self.turns, self.tool
        mean = sum(turn.seconds for turn in turns) / max(1, len(turns))
        return session_times(self.sessions, tool, by_predictions(tool, mean))


@dataclass(slots=True)
class AgentToolsReport:
    """The replays of all files, where tools have `share` of the time."""

    share: float
    files: list[FileReplay] = field(default_factory=list)

    def show(self) -> Iterator[RenderableType]:
        predicted = ("file", "turns", "read-only calls", "top 1", "top 3")
        yield report.table("Calls predicted before their turn", predicted, map(self._predicted, self.files))
        times = ("file", "off", "drafting", "+ tools", "+ tools vs drafting", "starts", "used", "wasted")
        yield report.table("Seconds of a session, computed", times, map(self._times, self.files))

    def data(self) -> dict[str, Any]:
        files = {one.name: self._data(one) for one in self.files}
        return {"share": self.share, "files": files}

    def _data(self, one: FileReplay) -> dict[str, Any]:
        times = one.times()
        return {
            "turns": len(one.turns),
            "read_only_calls": len(list(one.reads())),
            "top_1": one.hit_rate(1),
            "top_3": one.hit_rate(3),
            "times": asdict(times),
            "speedup": times.speedup,
        }

    def _predicted(self, one: FileReplay) -> Sequence[str]:
        counts = str(len(one.turns)), str(len(list(one.reads())))
        rates = (one.hit_rate(1), one.hit_rate(3))
        return one.name, *counts, *(f"{rate:.1%}" for rate in rates)

    def _times(self, one: FileReplay) -> Sequence[str]:
        times, sessions = one.times(), max(1, len(one.sessions))
        seconds = [f"{total / sessions:.1f}" for total in (times.plain, times.drafting, times.early)]
        starts = str(times.starts), str(times.used), f"{times.wasted / sessions:.1f}"
        return one.name, *seconds, f"{times.speedup:.2f}x", *starts


def run_agent_tools(
    paths: Sequence[Path], *, read_only: Sequence[str] = READ_ONLY, share: float = 0.5, progress: Progress
) -> AgentToolsReport:
    """Replay the files, each from an empty memory. Raises `ConfigurationError` for one that holds no calls."""
    if not 0.0 < share < 1.0:
        raise ConfigurationError(f"the share of tools must lie between 0 and 1, not {share}", param="share")
    found = AgentToolsReport(share)
    for path, name in zip(paths, names_of(paths), strict=True):
        recorded = list(read(path))
        if not recorded:
            raise ConfigurationError(f"{path}: no answers in it")
        progress(f"drafting {name}")
        steps = draft_steps(recorded)
        progress(f"predicting {name}")
        found.files.append(FileReplay(name, share, play(recorded, steps, read_only, share)))
    return found
