"""What sessions took in real time under each variant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.report import MIN_PAIRS, paired_ratio

OFF, DRAFTING, TOOLS, PREFILL = VARIANTS = "off", "drafting", "+ tools", "+ prefill"
COLUMNS = (
    "variant", "seconds", "of which tools", f"vs {OFF}", f"vs {DRAFTING}", "tokens/step", "starts", "used",
    "wasted s", "same",
)  # fmt: skip


@dataclass(slots=True)
class TimedSession:
    """One session under one variant: the seconds of the model's turns and of the waits for tools, answers' tokens and
    steps, tools that were started early, how many results of these were used and how long the others ran, and all that
    the agent has read and written, in JSON.
    """

    model_seconds: float = 0.0
    tool_seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    starts: int = 0
    used: int = 0
    wasted: float = 0.0
    transcript: str = ""

    @property
    def seconds(self) -> float:
        return self.model_seconds + self.tool_seconds


@dataclass(slots=True)
class TimedFile:
    """The timed sessions of one file by variant, in which every tool takes `tool` seconds."""

    name: str
    tool: float
    sessions: dict[str, list[TimedSession]]

    def ratio(self, variant: str, baseline: str) -> str:
        """How many times less time sessions take; over few of them that of the sums."""
        one, other = ([session.seconds for session in self.sessions[name]] for name in (variant, baseline))
        return str(paired_ratio(other, one)) if len(one) >= MIN_PAIRS else f"{sum(other) / sum(one):.2f}x"

    def same(self, variant: str) -> int:
        """How many transcripts are those without speculation, byte for byte."""
        pairs = zip(self.sessions[variant], self.sessions[OFF], strict=True)
        return sum(one.transcript == other.transcript for one, other in pairs)

    def total(self, variant: str, name: str) -> float:
        return float(sum(getattr(session, name) for session in self.sessions[variant]))


@dataclass(slots=True)
class AgentTimedReport:
    """The timed sessions of all files."""

    files: list[TimedFile]

    def show(self) -> Iterator[RenderableType]:
        for one in self.files:
            count = len(one.sessions[OFF])
            title = f"{one.name}: {count} sessions in real time, each tool {one.tool:.2f} s; seconds of a session"
            yield report.table(title, COLUMNS, (self._row(one, variant) for variant in one.sessions))

    def data(self) -> dict[str, Any]:
        return {"files": [asdict(one) for one in self.files]}

    def _row(self, one: TimedFile, variant: str) -> Sequence[str]:
        count = len(one.sessions[variant])
        seconds, tools = one.total(variant, "seconds"), one.total(variant, "tool_seconds")
        counts = (f"{one.total(variant, name):.0f}" for name in ("starts", "used"))
        return (
            variant,
            f"{seconds / count:.1f}",
            f"{tools / seconds:.0%}",
            one.ratio(variant, OFF),
            one.ratio(variant, DRAFTING),
            f"{one.total(variant, 'tokens') / one.total(variant, 'steps'):.2f}",
            *counts,
            f"{one.total(variant, 'wasted') / count:.1f}",
            f"{one.same(variant)}/{count}",
        )
