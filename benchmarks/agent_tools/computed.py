"""Recorded sessions replayed in their order: which calls were predicted, and the time that early starts would save.

Nothing is learned from the future: each turn is predicted from the turns before it, of its own session and of earlier
ones. Times are computed (`clock`), and every tool takes as long as makes tools the given share of the time
without early starts. The model's steps are those of a replay of the same file with drafts of the suffix cache, whose
tokens are words and pieces of words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.agent_tools.replay import (
    ReplayedTurn,
    SessionTimes,
    by_predictions,
    draft_steps,
    play,
    session_times,
    tool_seconds,
)
from agentspec.benchmarks.report import Progress, names_of
from agentspec.errors import ConfigurationError
from agentspec.recordings.formats import detect, read

READ_ONLY = ("get_*", "search_*", "find_*", "list_*")


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
        recorded = list(read(path, detect(path)))
        if not recorded:
            raise ConfigurationError(f"{path}: no answers in it")
        progress(f"drafting {name}")
        steps = draft_steps(recorded)
        progress(f"predicting {name}")
        found.files.append(FileReplay(name, share, play(recorded, steps, read_only, share)))
    return found
