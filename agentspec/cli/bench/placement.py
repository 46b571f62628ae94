"""`agentspec bench placement`: compares placement policies on recorded sessions, on simulated engines."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentspec.cli.bench.publish import REPORT_WIDTH
from agentspec.cli.common import require_writable
from agentspec.cli.recorded_files import Files, FormatOption, SkipOption, choose, found, recorded_calls
from agentspec.errors import ConfigurationError

if TYPE_CHECKING:
    from agentspec.benchmarks.placement.scenario import Order, Scenario
    from agentspec.benchmarks.placement.workload import SessionShape


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
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE.json", exists=True, dir_okay=False, help="What an engine's steps cost")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other parameter, as they are printed")
    ] = None,
    format_: FormatOption = None,
    skip_bad: SkipOption = False,
    json: Annotated[Path | None, typer.Option(help="Write every seed's figures to this file")] = None,
) -> None:
    """Replay recorded sessions on simulated engines, and compare where their calls go and which is next."""
    from rich.console import Console

    from agentspec.benchmarks.placement.report import print_comparison, write_json
    from agentspec.benchmarks.placement.simulate import compare, require_room

    require_writable(json)
    errors = Console(stderr=True)
    given = {"engines": engines, "sessions": sessions, "rate": rate, **_parameters(set_ or [])}
    scenario = _scenario(given, costs)
    policies, orders = _names("--policy", policy), _names("--order", order)
    tried = [_checked(scenario, {"policy": one, "order": other}) for one in policies for other in orders]
    variants: list[tuple[str, Order]] = [(one.policy, one.order) for one in tried]
    shapes = _shapes(files, format_, skip_bad, errors)
    require_room(scenario, shapes)
    with errors.status("starting") as status:
        tell = status.update if errors.is_terminal else errors.print  # in a log a status shows nothing, for minutes
        comparison = compare(scenario, shapes, variants, seeds, tell)
    print_comparison(comparison, Console(width=None if sys.stdout.isatty() else REPORT_WIDTH))
    if json is not None:
        write_json(comparison, json)


def _names(option: str, text: str) -> list[str]:
    if not (names := [part.strip() for part in text.split(",") if part.strip()]):
        raise ConfigurationError(f"{option} names nothing")
    return names


def _parameters(given: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    if wrong := [text for text, (name, equals, _) in zip(given, pairs, strict=True) if not (name and equals)]:
        raise ConfigurationError(f"--set takes NAME=VALUE, not {wrong[0]!r}")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _scenario(given: Mapping[str, Any], costs: Path | None) -> Scenario:
    from agentspec.benchmarks.placement.scenario import EngineCosts, Scenario

    engine = EngineCosts() if costs is None else EngineCosts.read(costs)
    return _checked(Scenario(costs=engine), given)


def _checked(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """`scenario` with `changes`. Raises `ConfigurationError` that names the wrong parameter."""
    from pydantic import ValidationError

    try:
        return type(scenario).model_validate({**dict(scenario), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigurationError(
            f"{name}: {first['msg']}" if name else first["msg"].removeprefix("Value error, ")
        ) from None


def _shapes(files: list[Path], format_: Any, skip_bad: bool, console: Any) -> list[SessionShape]:
    from agentspec.benchmarks.placement.workload import shapes

    on_bad, _ = choose(skip_bad, console)
    calls = {str(file): recorded_calls(file, format_, on_bad) for file in found(files, console)}
    return shapes(calls)
