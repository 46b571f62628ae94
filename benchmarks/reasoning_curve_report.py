"""A table and a plot of accuracy and latency against the threshold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentspec.benchmarks.reasoning_curve import Curve, Point


def print_curve(curve: Curve, console: Console) -> None:
    """The table, how its seconds were found, and which threshold would be chosen."""
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


def write_plot(points: Sequence[Point], path: Path) -> None:
    """Accuracy against seconds, a mark for each threshold, into a PNG or SVG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot([point.seconds for point in points], [point.accuracy for point in points], "o-")
    for point in points:
        axes.annotate(point.name, (point.seconds, point.accuracy), textcoords="offset points", xytext=(6, 6))
    axes.set_xlabel("seconds a problem")
    axes.set_ylabel("accuracy")
    axes.set_ylim(-0.05, 1.05)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
