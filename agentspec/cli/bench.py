"""`agentspec bench`: the measurements whose figures the documentation quotes."""

from __future__ import annotations

import os
import platform
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Measure speed-ups on this machine.", no_args_is_help=True)


class Prompts(StrEnum):
    edit = "edit"
    short = "short"
    all = "all"


@app.callback()
def bench() -> None:
    """Measure speed-ups on this machine."""


@app.command()
def decode(
    model: Annotated[str, typer.Option(help="Built-in name, folder, GGUF file or model-hub id")] = "smollm2-135m",
    prompts: Annotated[Prompts, typer.Option(help="Which code-edit prompts: long answers, short ones, or both")] = (
        Prompts.all
    ),
    limit: Annotated[
        int | None, typer.Option(help="Only the first so many prompts of each set (at least 7)", min=7)
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every run and ratio to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios into this PNG or SVG file")] = None,
) -> None:
    """Decode the same prompts with transformers and with agentspec off, cold and warm, interleaved in one run."""
    from rich.console import Console

    from agentspec.benchmarks.decode import run_decode
    from agentspec.benchmarks.decode_report import print_tables, write_json, write_plot

    console = Console()
    _require_writable(json, plot)
    with console.status("starting") as status:
        tables = run_decode(model, sets=_sets(prompts), limit=limit, progress=status.update)
    print_tables(tables, console)
    if json:
        write_json(tables, json, _environment(model))
    if plot:
        write_plot(tables, plot)


def _sets(prompts: Prompts) -> list[Any]:
    return {Prompts.edit: ["edit"], Prompts.short: ["edit_short"], Prompts.all: ["edit", "edit_short"]}[prompts]


def _require_writable(*paths: Path | None) -> None:
    """Found out now rather than after a quarter of an hour of measuring."""
    for path in paths:
        if path and not os.access(path.absolute().parent, os.W_OK):
            raise typer.BadParameter(f"{path.parent} is not a folder that can be written to")


def _environment(model: str) -> dict[str, Any]:
    from importlib.metadata import version

    packages = {name: version(name) for name in ("agentspec", "torch", "transformers")}
    return {
        "model": model,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **packages,
    }
