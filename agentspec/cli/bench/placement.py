"""`agentspec bench placement`: compares placement policies on recorded sessions, on simulated engines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from agentspec.cli.bench.publish import REPORT_WIDTH
from agentspec.cli.common import require_writable
from agentspec.cli.recorded_files import Files, FormatOption, SkipOption, choose, found, recorded_calls


def placement(
    files: Files,
    policy: Annotated[str, typer.Option(help="Policies, separated by commas")] = "round_robin,least_loaded,workflow",
    order: Annotated[
        str, typer.Option(help="Orders of waiting calls, separated by commas: arrival, deadline")
    ] = "arrival",
    engines: Annotated[int, typer.Option(help="Engines", min=1)] = 10,
    sessions: Annotated[int, typer.Option(help="Sessions that arrive, drawn from the recorded ones", min=1)] = 5000,
    rate: Annotated[float, typer.Option(help="Sessions that arrive in a second", min=0.0001)] = 1.0,
    seeds: Annotated[int, typer.Option(help="Runs of each, with other arrivals", min=1)] = 5,
    scenario: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            exists=True,
            dir_okay=False,
            help="Any other parameter, and what a step costs",
        ),
    ] = None,
    format_: FormatOption = None,
    skip_bad: SkipOption = False,
    json: Annotated[Path | None, typer.Option(help="Write every seed's figures to this file")] = None,
) -> None:
    """Replay recorded sessions on simulated engines, and compare where their calls go and which is next."""
    from rich.console import Console

    from agentspec.benchmarks.placement.report import print_comparison, write_json
    from agentspec.benchmarks.placement.scenario import Scenario
    from agentspec.benchmarks.placement.simulate import compare, require_room
    from agentspec.benchmarks.placement.workload import shapes

    require_writable(json)
    errors = Console(stderr=True)
    named = [{"policy": one, "order": other} for one in policy.split(",") for other in order.split(",")]
    tried = [Scenario.read(scenario, engines=engines, sessions=sessions, rate=rate, **one) for one in named]
    on_bad, _ = choose(skip_bad, errors)
    recorded = shapes({str(file): recorded_calls(file, format_, on_bad) for file in found(files, errors)})
    require_room(tried[0], recorded)
    with errors.status("starting") as status:
        tell = status.update if errors.is_terminal else errors.print  # in a log a status shows nothing, for minutes
        comparison = compare(tried[0], recorded, [(one.policy, one.order) for one in tried], seeds, tell)
    print_comparison(comparison, Console(width=None if sys.stdout.isatty() else REPORT_WIDTH))
    if json is not None:
        write_json(comparison, json)
