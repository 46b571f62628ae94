"""Accuracy and latency of a SpecReason model at each threshold, with the table, plot and file of the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentspec.errors import InvalidRequestError
from agentspec.reasoning.settings import SpecReasonSettings

EVERY = 1 << 31  # `first_steps` that makes the base model write every step; the other settings stay the same


@dataclass(frozen=True, slots=True)
class SolvedProblem:
    """One problem at one threshold. Only tokens of the thinking are counted; `CurvePlan` explains `seconds`."""

    correct: bool
    seconds: float
    steps: int
    proposed: int
    accepted: int
    base_tokens: int
    small_tokens: int
    spent_tokens: int


@dataclass(slots=True)
class CurvePoint:
    """The results of all problems at one threshold; threshold None is the base model alone, without drafts."""

    threshold: float | None
    solved: list[SolvedProblem] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "base alone" if self.threshold is None else f"{self.threshold:g}"

    @property
    def accuracy(self) -> float:
        return self._total(lambda one: one.correct) / len(self.solved)

    @property
    def seconds(self) -> float:
        """Mean seconds per problem."""
        return self._total(lambda one: one.seconds) / len(self.solved)

    @property
    def base_share(self) -> float:
        """Share of the kept thinking tokens that the base model wrote."""
        base = self._total(lambda one: one.base_tokens)
        return base / max(1, base + self._total(lambda one: one.small_tokens))

    @property
    def acceptance(self) -> float:
        return self._total(lambda one: one.accepted) / max(1, self._total(lambda one: one.proposed))

    def _total(self, figure: Callable[[SolvedProblem], float]) -> float:
        return sum(map(figure, self.solved))


@dataclass(frozen=True, slots=True)
class CurvePlan:
    """A measurement to make: `[models.model]` at each threshold, with `changes` to its other settings.

    With `reuse`, repeated requests are answered from memory, since the thinking at several thresholds begins alike. The
    seconds of a problem are then the sum of its calls' seconds when they were made, and `pipelined` is turned off.
    Without `reuse` every call is made and measured by the wall clock. Sampled answers are never reused.
    """

    model: str
    thresholds: tuple[float, ...]
    changes: Mapping[str, int] = field(default_factory=dict)
    temperature: float = 0.0
    max_tokens: int | None = None
    reuse: bool = True

    @property
    def reuses(self) -> bool:
        return self.reuse and self.temperature == 0

    def settings(self, strategy: SpecReasonSettings, threshold: float | None) -> SpecReasonSettings:
        """The strategy's settings at one threshold."""
        setting = {"first_steps": EVERY} if threshold is None else {"threshold": threshold}
        unpipelined = {"pipelined": False} if self.reuses else {}
        return strategy.model_copy(update={**self.changes, **unpipelined, **setting})


@dataclass(slots=True)
class ThresholdCurve:
    """The results so far; all points cover the same problems."""

    plan: CurvePlan
    points: list[CurvePoint]
    calls: int = 0
    remembered: int = 0

    @classmethod
    def begun(cls, plan: CurvePlan) -> ThresholdCurve:
        return cls(plan, [CurvePoint(threshold) for threshold in (None, *plan.thresholds)])

    @property
    def problems(self) -> int:
        return min(len(point.solved) for point in self.points)

    def write(self, path: Path) -> None:
        """Write the file atomically, so that an interrupted run can be resumed from it."""
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(asdict(self), indent=2))
        part.replace(path)

    @classmethod
    def read(cls, path: Path, plan: CurvePlan) -> ThresholdCurve:
        """Read an unfinished measurement of `plan`. Raises `InvalidRequestError` if `path` holds anything else."""
        try:
            kept = json.loads(path.read_text())
            same = kept["plan"] == json.loads(json.dumps(asdict(plan)))
            points = [CurvePoint(p["threshold"], [SolvedProblem(**one) for one in p["solved"]]) for p in kept["points"]]
            found = cls(plan, points, kept["calls"], kept["remembered"])
        except (ValueError, KeyError, TypeError):
            raise InvalidRequestError(f"{path} holds no curve: name another file") from None
        if not same:
            raise InvalidRequestError(f"{path} was measured with other options: repeat those, or name another file")
        return found


def print_curve(curve: ThresholdCurve, console: Console) -> None:
    """Print the table, how its seconds were measured, and the threshold to choose."""
    points = curve.points
    alone = points[0].seconds
    table = Table(title=f"{curve.problems} problems")
    for heading in ("threshold", "accuracy", "seconds", "of base alone", "acceptance", "base share"):
        table.add_column(heading, justify="right")
    for point in points:
        figures = (point.accuracy, point.seconds, point.seconds / alone, point.acceptance, point.base_share)
        table.add_row(point.name, *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    if curve.plan.reuses:
        every = curve.calls + curve.remembered
        console.print(
            f"Of {every} calls {curve.calls} were made; seconds are the sum of an answer's calls, each as long as when"
            " it was made, one after another."
        )
    best = max(point.accuracy for point in points)
    chosen = min((point for point in points if point.accuracy == best), key=lambda point: point.seconds)
    console.print(f"Fastest of the most accurate: {'' if chosen.threshold is None else 'threshold = '}{chosen.name}")


def write_plot(points: Sequence[CurvePoint], path: Path) -> None:
    """Draw accuracy against seconds, a mark for each threshold. Needs matplotlib (extra `bench`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([point.seconds for point in points], [point.accuracy for point in points], "o-")
    for point in points:
        axes.annotate(point.name, (point.seconds, point.accuracy), textcoords="offset points", xytext=(6, 6))
    axes.set_xlabel("seconds a problem")
    axes.set_ylabel("accuracy")
    axes.set_ylim(-0.05, 1.05)
    figure.savefig(path)
