"""Shared parts of all benchmarks: figures with goals, paired ratios, tables, JSON and conditions."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table

from agentspec.errors import ConfigurationError

T = TypeVar("T")

RESAMPLES = 10_000
MIN_PAIRS = 7
NAMES = {"variant", "file", "figure", "note", "verdict", "server", "case", "of", "strides", "drafter", "pair"}

Progress = Callable[[str], None]
Verdict = Literal["aim met", "met", "undecided", "missed", "not measured"]


class BenchmarkReport(Protocol):
    """The result of a benchmark."""

    def show(self) -> Iterator[RenderableType]:
        """The tables and lines to print, in order."""
        ...

    def data(self) -> dict[str, Any]:
        """The data that --json writes besides the conditions, from which each figure can be computed again."""
        ...


def print_report(report: BenchmarkReport, console: Console) -> None:
    for part in report.show():
        console.print(part)


def write_json(report: BenchmarkReport, path: Path, environment: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({"environment": environment, **report.data()}, indent=1))


def conditions(*packages: str, **subject: str) -> dict[str, Any]:
    """The conditions of a figure: the measured subject, the machine and its load, and the versions of the packages."""
    return {
        **subject,
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("agentspec-inference", *packages)},
    }


def table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table with the columns in `NAMES` aligned left and all others right."""
    built = Table(title=title, title_justify="left")
    for column in columns:
        built.add_column(column, justify="left" if column in NAMES else "right")
    for row in rows:
        built.add_row(*row)
    return built


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement, or None if it was not made, with the bound it must keep and the bound it should keep, in `unit`.

    `interval` is its 95 % interval, if it has one, which keeps a bound as a whole. `note` says what limits the
    comparison.
    """

    name: str
    value: float | None
    unit: str = ""
    required: float | None = None
    aim: float | None = None
    at_most: bool = True
    note: str = ""
    interval: tuple[float, float] | None = None

    @property
    def verdict(self) -> Verdict:
        if self.value is None:
            return "not measured"
        if self._keeps(self.aim):
            return "aim met"
        if self._keeps(self.required):
            return "met"
        return "undecided" if any(self._reached(self.required)) else "missed"

    @property
    def sign(self) -> str:
        return "<=" if self.at_most else ">="

    def _keeps(self, bound: float | None) -> bool:
        reached = self._reached(bound)
        return bool(reached) and all(reached)

    def _reached(self, bound: float | None) -> list[bool]:
        """Whether the value, or each end of its interval, keeps the bound; empty if either is missing."""
        if self.value is None or bound is None:
            return []
        return [end <= bound if self.at_most else end >= bound for end in self.interval or (self.value,)]

    def __str__(self) -> str:
        if self.value is None:
            return "not measured"
        ends = "" if self.interval is None else " [{:.3g}, {:.3g}]".format(*self.interval)
        return f"{self.value:.3g}{ends} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of `pairs` paired ratios, with the bounds of its 95 % interval."""

    median: float
    low: float
    high: float
    pairs: int

    def verdict(self, least: float) -> str:
        """Returns "met" if the whole interval lies at or above `least`, "missed" if below it, else "undecided"."""
        if self.low >= least:
            return "met"
        return "missed" if self.high < least else "undecided"

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True)
class RatioGoal:
    """The ratio to a baseline that a variant must reach (`required`, by its lower bound) or should (`aim`)."""

    variant: str
    baseline: str
    required: float
    aim: float | None = None

    def line(self, ratio: Ratio) -> str:
        verdict = ratio.verdict(self.required)
        return f"  {self.variant} / {self.baseline}: {ratio}, goal {self.required}x: {verdict}"


def paired_ratio(values: Sequence[float], baseline: Sequence[float], *, seed: int = 0) -> Ratio:
    """Median of `values[i] / baseline[i]`, with a percentile bootstrap over the pairs (Efron 1979).

    Raises ValueError for sequences of different length or with fewer than seven pairs.
    """
    if len(values) != len(baseline) or len(values) < MIN_PAIRS:
        raise ValueError(f"need two equally long sequences of at least {MIN_PAIRS}: {len(values)}, {len(baseline)}")
    ratios = np.asarray(values, dtype=np.float64) / np.asarray(baseline, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))


def rotated(items: Mapping[str, T], by: int) -> list[tuple[str, T]]:
    """The items, rotated by `by` places, so that no item is always first."""
    listed = list(items.items())
    start = by % len(listed)
    return listed[start:] + listed[:start]


def names_of(paths: Sequence[Path]) -> list[str]:
    """The name of each file, with as many of its folders as tell it from the others.

    Raises `ConfigurationError` for a file that is given twice.
    """
    parts = [path.absolute().parts for path in paths]
    ends = Counter(whole[-length:] for whole in parts for length in range(1, len(whole) + 1))
    if twice := [str(path) for path, whole in zip(paths, parts, strict=True) if ends[whole] > 1]:
        raise ConfigurationError(f"{twice[0]} is given twice; name each file once")
    lengths = (next(length for length in range(1, len(one) + 1) if ends[one[-length:]] == 1) for one in parts)
    return [str(Path(*one[-length:])) for one, length in zip(parts, lengths, strict=True)]
