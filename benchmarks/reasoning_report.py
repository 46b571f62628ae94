"""Tables, JSON and a plot of the reasoning benchmark."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentspec.benchmarks.reasoning import PUBLISHED, Prediction, Report


def print_report(report: Report, console: Console) -> None:
    if report.figures:
        table = Table(title="step delegation")
        for heading in ("figure", "measured", "goal", ""):
            table.add_column(heading, justify="left" if heading == "figure" else "right")
        for figure in report.figures:
            bound = f"{'>=' if figure.at_least else '<='} {figure.goal:g} {figure.unit}"
            table.add_row(figure.name, f"{figure.value:.2f} {figure.unit}", bound, "met" if figure.met else "MISSED")
        console.print(table)
    if report.predictions:
        console.print(_predicted(report.predictions))
        console.print(f"Published, measured (arXiv 2504.07891): {PUBLISHED[0]:g} to {PUBLISHED[1]:g} times.")


def _predicted(predictions: list[Prediction]) -> Table:
    table = Table(title="predicted speed-up over the base model alone")
    for heading in ("acceptance", "plain", "pipelined"):
        table.add_column(heading, justify="right")
    for prediction in predictions:
        table.add_row(*(f"{value:.2f}" for value in (prediction.acceptance, prediction.plain, prediction.pipelined)))
    return table


def write_json(report: Report, path: Path, environment: dict[str, Any]) -> None:
    path.write_text(json.dumps({"environment": environment, **asdict(report)}, indent=2))


def write_plot(report: Report, path: Path) -> None:
    """The prediction, with the published range behind it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.axhspan(*PUBLISHED, alpha=0.15, label="published, measured")
    at = [prediction.acceptance for prediction in report.predictions]
    axes.plot(at, [prediction.plain for prediction in report.predictions], label="predicted")
    axes.plot(at, [prediction.pipelined for prediction in report.predictions], "--", label="predicted, pipelined")
    axes.set_xlabel("share of steps accepted")
    axes.set_ylabel("times faster than the base model alone")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
