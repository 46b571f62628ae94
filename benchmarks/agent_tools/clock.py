"""What sessions take with early starts, by a clock of their own: nothing is waited for.

Every tool takes as long as any other, calls of one turn run at once, and a user takes `USER` seconds to reply, which
are no time of the session but age the results that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from agentspec.tools.policy import ToolPolicy
from agentspec.tools.prediction.history import ToolCall
from agentspec.tools.prediction.model import TURN, CallForecast
from agentspec.tools.starts import AT_ONCE, PER_TURN, worthwhile

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
