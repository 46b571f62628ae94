"""Prints the report of a benchmark, and writes it to the files asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from agentspec.cli.common import require_writable

if TYPE_CHECKING:
    from agentspec.benchmarks.report import BenchmarkReport

TORCH = ("torch", "transformers")  # packages whose versions go into the JSON file of what runs them
REPORT_WIDTH = 150  # columns of a table that goes to a file
R = TypeVar("R", bound="BenchmarkReport")


def publish(
    measure: Callable[..., R],
    json: Path | None,
    *,
    packages: Sequence[str] = (),
    wide: bool = True,
    subject: Mapping[str, str] | None = None,
) -> R:
    """Call `measure(progress=...)`, print its report, and write the requested files, with `conditions` in the JSON."""
    from rich.console import Console

    from agentspec.benchmarks.report import conditions, print_report, write_json

    require_writable(json)
    console = Console(width=REPORT_WIDTH if wide and not sys.stdout.isatty() else None)
    with console.status("starting") as status:
        report = measure(progress=status.update)
    print_report(report, console)
    if json:
        write_json(report, json, conditions(*packages, **(subject or {})))
    return report
