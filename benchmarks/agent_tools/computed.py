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
from agentspec.benchmarks.agent_tools.clock import (
    ReplayedTurn,
    SessionTimes,
    by_predictions,
    foreseeable_calls,
    next_calls,
    session_times,
    tool_seconds,
)
from agentspec.benchmarks.agent_tools.replay import draft_steps, play
from agentspec.benchmarks.report import Progress
from agentspec.errors import ConfigurationError
from agentspec.recordings.formats import detect, names_of, read
from agentspec.tools.launching import LaunchLimits

THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
HIT_RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
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
        return FileReplay(self.name, self.share, [[turn for turn in one if turn.calls] for one in self.sessions])

    @property
    def tool(self) -> float:
        """How many seconds each tool takes."""
        return tool_seconds(self.turns, self.share)

    @property
    def hidden_share(self) -> float:
        """The share of the tools' time that turns wait for which call read-only tools alone."""
        waits = [turn.only_reads for turn in self.turns if turn.calls]
        return sum(waits) / max(1, len(waits))

    def times(self, limits: LaunchLimits) -> SessionTimes:
        """With the starts that the predictor makes."""
        turns, tool = self.turns, self.tool
        mean = sum(turn.seconds for turn in turns) / max(1, len(turns))
        return session_times(self.sessions, tool, by_predictions(limits, tool, mean), limits.at_once)

    def bounds(self) -> tuple[float, float]:
        """The speed-ups of who knows calls: before their turn, and once their arguments were seen."""
        first, second = (
            session_times(self.sessions, self.tool, choose, 1000).speedup for choose in (next_calls, foreseeable_calls)
        )
        return first, second

    def at_hit_rate(self, rate: float) -> float:
        """The speed-up if this share of the turns with read-only calls alone were predicted just before them."""
        tool = self.tool
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
        predicted = ("file", "turns", "read-only calls", "top 1", "top 3")
        yield report.table("Calls predicted before their turn", predicted, map(self._predicted, self.files))
        timed = [one for whole in self.files for one in (whole, whole.calling())]
        names = [name for one in self.files for name in (one.name, "  turns with calls")]
        times = ("file", "off", "drafting", "+ tools", "+ prefill", "+ tools vs drafting")
        yield report.table("Seconds of a session, computed", times, map(self._times, names, timed))
        starts = ("file", "starts", "used", "wasted, s a session")
        yield report.table("Early starts", starts, map(self._starts, names, timed))
        bounds = ("file", "tool s", "of tools' time read-only", "next calls known", "calls known once seen")
        yield report.table("What early starts could save at most", bounds, map(self._bounds, names, timed))
        columns = ("probability", "predictions", "came", "calls hit")
        for one in self.files:
            rows = ((f"{at:.2f}", *self._precision(one, at)) for at in THRESHOLDS)
            yield report.table(f"{one.name}: by threshold", columns, rows)
        rates = ("file", *(f"{rate:.0%}" for rate in HIT_RATES))
        calling = [one.calling() for one in self.files]
        curve = ((one.name, *(f"{one.at_hit_rate(rate):.2f}" for rate in HIT_RATES)) for one in calling)
        yield report.table("Speed-up of turns with calls at given hit rates, computed", rates, curve)

    def data(self) -> dict[str, Any]:
        files = {one.name: self._data(one) for one in self.files}
        return {"share": self.share, "cost_weight": self.limits.cost_weight, "files": files}

    def _data(self, one: FileReplay) -> dict[str, Any]:
        calling = one.calling()
        return {
            "turns": len(one.turns),
            "read_only_calls": len(list(one.reads())),
            "top_1": one.hit_rate(1),
            "top_3": one.hit_rate(3),
            "times": asdict(one.times(self.limits)),
            "speedup": one.times(self.limits).speedup,
            "speedup_of_calling_turns": calling.times(self.limits).speedup,
            "bounds": one.bounds(),
            "bounds_of_calling_turns": calling.bounds(),
            "thresholds": {str(at): one.precision(at) for at in THRESHOLDS},
            "speedup_at_hit_rate": {str(rate): calling.at_hit_rate(rate) for rate in HIT_RATES},
        }

    def _predicted(self, one: FileReplay) -> Sequence[str]:
        counts = str(len(one.turns)), str(len(list(one.reads())))
        rates = (one.hit_rate(1), one.hit_rate(3))
        return one.name, *counts, *(f"{rate:.1%}" for rate in rates)

    def _times(self, name: str, one: FileReplay) -> Sequence[str]:
        times = one.times(self.limits)
        totals = (times.plain, times.drafting, times.early, times.prefill)
        seconds = (f"{total / max(1, len(one.sessions)):.1f}" for total in totals)
        return name, *seconds, f"{times.speedup:.2f}x"

    def _starts(self, name: str, one: FileReplay) -> Sequence[str]:
        times = one.times(self.limits)
        return name, str(times.starts), str(times.used), f"{times.wasted / max(1, len(one.sessions)):.1f}"

    def _bounds(self, name: str, one: FileReplay) -> Sequence[str]:
        return name, f"{one.tool:.2f}", f"{one.hidden_share:.0%}", *(f"{bound:.2f}x" for bound in one.bounds())

    def _precision(self, one: FileReplay, threshold: float) -> Sequence[str]:
        tried, came, hit = one.precision(threshold)
        return str(tried), f"{came:.0%}", f"{hit:.0%}"


def run_agent_tools(
    paths: Sequence[Path], *, read_only: Sequence[str] = READ_ONLY, share: float = 0.5, progress: Progress
) -> AgentToolsReport:
    """Replay the files, each from an empty memory. Raises `ConfigurationError` for one that holds no calls."""
    if not 0.0 < share < 1.0:
        raise ConfigurationError(f"the share of tools must lie between 0 and 1, not {share}", param="share")
    found = AgentToolsReport(share, LaunchLimits())
    for path, name in zip(paths, names_of(paths), strict=True):
        recorded = list(read(path, detect(path)))
        if not recorded:
            raise ConfigurationError(f"{path}: no answers in it")
        progress(f"drafting {name}")
        steps = draft_steps(recorded)
        progress(f"predicting {name}")
        found.files.append(FileReplay(name, share, play(recorded, steps, read_only, share)))
    return found
