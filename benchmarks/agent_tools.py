"""Recorded sessions replayed in their order: which calls were predicted, and the time that early starts would save.

Nothing is learned from the future: each turn is predicted from the turns before it, of its own session and of earlier
ones. Times are computed, not waited for: a model's turn takes `FIRST` seconds and `PER_TOKEN` for each token of its
answer, and every tool takes as long as makes tools the given share of the time without early starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.report import Progress
from agentspec.errors import ConfigurationError
from agentspec.recordings.calls import RecordedCall
from agentspec.recordings.formats import detect, read
from agentspec.tools.launching import LaunchLimits, worthwhile
from agentspec.tools.prediction.history import ToolCall, ToolHistory
from agentspec.tools.prediction.model import TURN, CallForecast, CallModel

THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
HIT_RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
READ_ONLY = ("get_*", "search_*", "find_*", "list_*")
FIRST, PER_TOKEN = 0.3, 0.02  # seconds


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """One turn: its seconds, its calls, the forecast, and which predictions would have been started."""

    seconds: float
    calls: tuple[ToolCall, ...]
    forecast: CallForecast
    read_only: frozenset[str]  # identities of the calls that may run early
    only_reads: bool

    @property
    def top(self) -> list[str]:
        """The identities of the predicted calls, most likely first."""
        return [one.call.identity for one in self.forecast.predictions]


@dataclass(slots=True)
class FileReplay:
    """The turns of one file."""

    name: str
    turns: list[ReplayedTurn] = field(default_factory=list)

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

    def precision(self, threshold: float, most: int = 3) -> tuple[int, float, float]:
        """(predictions of at least this probability, the share of them that came, the share of calls that they hit)."""
        tried = [
            one.call.identity in turn.read_only
            for turn in self.turns
            for one in turn.forecast.predictions[:most]
            if one.probability >= threshold
        ]
        return len(tried), sum(tried) / max(1, len(tried)), sum(tried) / max(1, len(list(self.reads())))

    def calling(self) -> FileReplay:
        """The turns with calls alone."""
        return FileReplay(self.name, [turn for turn in self.turns if turn.calls])

    def tool_seconds(self, share: float) -> float:
        """How long each tool takes, where tools have this share of the time; calls of one turn run at once."""
        waits = sum(bool(turn.calls) for turn in self.turns)
        return share / (1.0 - share) * sum(turn.seconds for turn in self.turns) / max(1, waits)

    def speedup(self, share: float, limits: LaunchLimits) -> tuple[float, float]:
        """(how many times less time sessions take with early starts, seconds that tools ran for nothing per turn)."""
        tool = self.tool_seconds(share)
        plain = early = wasted = mean = 0.0
        for number, turn in enumerate(self.turns):
            known = {one.call.name: tool for one in turn.forecast.predictions} | {TURN: mean or 1.0}
            chosen = worthwhile(turn.forecast.predictions, known, limits.cost_weight)[: limits.per_turn]
            started = {one.call.identity for one in chosen}
            hits = started & turn.read_only if turn.only_reads else set()
            wasted += (len(started) - len(hits)) * min(tool, turn.seconds)
            left = max(0.0, tool - turn.seconds)
            waits = [left if call.identity in hits else tool for call in turn.calls]
            plain += turn.seconds + (tool if turn.calls else 0.0)
            early += turn.seconds + max(waits, default=0.0)
            mean += (turn.seconds - mean) / (number + 1)
        return plain / early, wasted / max(1, len(self.turns))

    def at_hit_rate(self, rate: float, share: float) -> float:
        """The speed-up if this share of the turns with read-only calls alone were predicted."""
        tool = self.tool_seconds(share)
        plain = sum(turn.seconds + (tool if turn.calls else 0.0) for turn in self.turns)
        reads = [turn for turn in self.turns if turn.calls and turn.only_reads]
        return plain / (plain - rate * sum(min(tool, turn.seconds) for turn in reads))


@dataclass(slots=True)
class AgentToolsReport:
    """The replays of all files, where tools have `share` of the time."""

    share: float
    limits: LaunchLimits
    files: list[FileReplay] = field(default_factory=list)

    def show(self) -> Iterator[RenderableType]:
        speedups = ("speed-up", "of turns with calls", "wasted s/turn")
        columns = ("file", "turns", "read-only calls", "top 1", "top 3", *speedups)
        yield report.table("Calls predicted before their turn", columns, map(self._row, self.files))
        for one in self.files:
            rows = ((f"{at:.2f}", *self._precision(one, at)) for at in THRESHOLDS)
            yield report.table(f"{one.name}: by threshold", ("probability", "predictions", "came", "calls hit"), rows)
        rates = ("file", *(f"{rate:.0%}" for rate in HIT_RATES))
        calling = [one.calling() for one in self.files]
        curve = ((one.name, *(f"{one.at_hit_rate(rate, self.share):.2f}" for rate in HIT_RATES)) for one in calling)
        yield report.table("Speed-up of turns with calls at given hit rates, computed", rates, curve)

    def data(self) -> dict[str, Any]:
        return {
            "share": self.share,
            "cost_weight": self.limits.cost_weight,
            "files": {
                one.name: {
                    "turns": len(one.turns),
                    "read_only_calls": len(list(one.reads())),
                    "top_1": one.hit_rate(1),
                    "top_3": one.hit_rate(3),
                    "speedup": one.speedup(self.share, self.limits)[0],
                    "speedup_of_calling_turns": one.calling().speedup(self.share, self.limits)[0],
                    "thresholds": {str(at): one.precision(at) for at in THRESHOLDS},
                    "speedup_at_hit_rate": {
                        str(rate): one.calling().at_hit_rate(rate, self.share) for rate in HIT_RATES
                    },
                }
                for one in self.files
            },
        }

    def _row(self, one: FileReplay) -> Sequence[str]:
        speedup, wasted = one.speedup(self.share, self.limits)
        calling, _ = one.calling().speedup(self.share, self.limits)
        rates = (
            f"{one.hit_rate(1):.1%}",
            f"{one.hit_rate(3):.1%}",
            f"{speedup:.2f}",
            f"{calling:.2f}",
            f"{wasted:.2f}",
        )
        return (one.name, str(len(one.turns)), str(len(list(one.reads()))), *rates)

    def _precision(self, one: FileReplay, threshold: float) -> Sequence[str]:
        tried, came, hit = one.precision(threshold)
        return str(tried), f"{came:.0%}", f"{hit:.0%}"


def run_agent_tools(
    paths: Sequence[Path], *, read_only: Sequence[str] = READ_ONLY, share: float = 0.5, progress: Progress
) -> AgentToolsReport:
    """Replay the files, each from an empty memory. Raises `ConfigurationError` for one that cannot be read."""
    if not 0.0 < share < 1.0:
        raise ConfigurationError(f"the share of tools must lie between 0 and 1, not {share}", param="share")
    found = AgentToolsReport(share, LaunchLimits())
    for path in paths:
        progress(f"replaying {path.name}")
        found.files.append(replay(path.name, read(path, detect(path)), read_only))
    return found


def replay(name: str, recorded: Iterator[RecordedCall], read_only: Sequence[str]) -> FileReplay:
    """Predict every turn of the sessions, and learn it afterwards."""
    done, model = FileReplay(name), CallModel()
    for session, calls in groupby(recorded, key=lambda one: one.labels.session):
        history, seen = ToolHistory(), 0
        waiting: Iterator[str] = iter(())
        for call in calls:
            if len(call.messages) < seen:  # its history was reset
                history, seen = ToolHistory(), 0
            for message in call.messages[seen:]:
                waiting = _hear(history, message, waiting)
            seen = len(call.messages)
            done.turns.append(_turn(model, history, call, str(session), read_only))
    return done


def _turn(
    model: CallModel, history: ToolHistory, recorded: RecordedCall, session: str, read_only: Sequence[str]
) -> ReplayedTurn:
    tools = _Matching(read_only)
    forecast = model.predict(history, tools)
    calls = tuple(_calls(recorded.answer))
    seconds = FIRST + PER_TOKEN * len(json.dumps(recorded.answer)) / 4
    model.learn(model.observe(history, calls, forecast, tools), session)
    reads = frozenset(call.identity for call in calls if call.name in tools)
    return ReplayedTurn(seconds, calls, forecast, reads, all(call.name in tools for call in calls))


class _Matching(frozenset[str]):
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
        calls = list(_calls(message))
        for call in calls:
            history.makes(call)
        return iter([call.name for call in calls])
    else:
        history.reads(text)
    return waiting


def _calls(message: Any) -> Iterator[ToolCall]:
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
