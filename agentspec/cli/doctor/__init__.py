"""`agentspec doctor` prints one line per check, and for each failed check what to do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agentspec.cli.common import FAILED, ConfigOption, JsonOption, load, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentspec.cli.doctor.checks import Check

_MARKS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}


def doctor(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Check the installation, models, folders, upstreams and strategies; exit code 1 if something needed is broken."""
    results = []
    for check in _checks(config):
        results.append(check)
        if not json:
            typer.echo(f"{_MARKS[check.state]}  {check.name}: {check.detail}")
            if check.advice:
                typer.echo(f"      -> {check.advice}")
    if json:
        print_json([asdict(check) for check in results])
    if any(check.state == "fail" for check in results):
        raise typer.Exit(FAILED)


def _checks(config: Path | None) -> Iterator[Check]:
    from agentspec.cli.doctor import checks, strategy_checks
    from agentspec.cli.doctor.checks import Check
    from agentspec.errors import ConfigurationError
    from agentspec.settings.load import Settings

    try:
        settings = load(config)
    except ConfigurationError as error:
        yield Check("configuration", "fail", str(error), "correct it; the checks below use the defaults")
        settings = Settings()
    yield from checks.all_checks(settings)
    yield from strategy_checks.check_strategies(settings)
