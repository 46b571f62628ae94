"""`agentspec usage` prints what the gateway's API keys used, from the cache's database."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from agentspec.cli.cache.folder import PathOption, folder_of
from agentspec.cli.common import ConfigOption, JsonOption, load, print_json

if TYPE_CHECKING:
    from agentspec.cache.usage import UsageRow
    from agentspec.settings.load import Settings

_NAMES = ("day", "tenant", "key", "model")

Value = str | int


def usage(
    tenant: Annotated[str | None, typer.Option(help="Of this tenant")] = None,
    model: Annotated[str | None, typer.Option(help="Of this model")] = None,
    since: Annotated[
        str | None, typer.Option(help="From this day (UTC), such as 2026-11-01, or so long ago, such as 7d")
    ] = None,
    until: Annotated[str | None, typer.Option(help="To this day, which is included, or so long ago")] = None,
    by: Annotated[str, typer.Option(help="A line for each: day, tenant, key, model, separated by commas")] = (
        "tenant,key,model"
    ),
    config: ConfigOption = None,
    path: PathOption = None,
    json: JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV, without totals.")] = False,
) -> None:
    """Print requests and tokens of each tenant, API key and model. A gateway may use the database meanwhile.

    Its newest counts come after at most five seconds.
    """
    names = _columns(by)
    if json and csv:
        raise typer.BadParameter("--json and --csv exclude each other")
    days = {"since": _day(since, "since", ""), "until": _day(until, "until", "9999")}
    rows = _read(load(config), path, tenant, model, days)
    lines, total = _summed(rows, names), _counts(rows)
    if json:
        print_json({"usage": lines, "total": total})
    elif csv:
        _print_csv(names, lines)
    else:
        _print_table(names, lines, total)


def _read(
    settings: Settings, path: str | None, tenant: str | None, model: str | None, days: Mapping[str, str]
) -> list[UsageRow]:
    from agentspec.cache.usage.alone import UsageAlone

    store = UsageAlone.open(folder_of(settings, path), settings.cache.usage_days)
    try:
        return store.read(tenant=tenant, model=model, **days)
    finally:
        store.close()


def _columns(by: str) -> list[str]:
    names = [name.strip() for name in by.split(",") if name.strip()]
    unknown = [name for name in names if name not in _NAMES]
    if not names or unknown or len(set(names)) < len(names):
        shown = repr(unknown[0] if unknown else by)
        raise typer.BadParameter(f"--by takes {', '.join(_NAMES)}, each once, not {shown}")
    return names


def _day(given: str | None, option: str, otherwise: str) -> str:
    """A day as it is stored. Raises `typer.BadParameter` for text that is neither a day nor a time span."""
    from datetime import date

    from agentspec.cache.settings import parse_span
    from agentspec.cache.usage import day_of

    if given is None:
        return otherwise
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", given):
            return date.fromisoformat(given).isoformat()
        return day_of(time.time() - float(str(parse_span(given))))
    except (ValueError, OverflowError, OSError):
        message = f"--{option} takes a day such as 2026-11-01 or a time span such as 7d, not {given!r}"
        raise typer.BadParameter(message) from None


def _counts(rows: Iterable[UsageRow]) -> dict[str, int]:
    from agentspec.cache.usage import COUNTS

    found = dict.fromkeys(COUNTS, 0)
    for row in rows:
        for name in COUNTS:
            found[name] += getattr(row, name)
    return found


def _summed(rows: Iterable[UsageRow], names: Sequence[str]) -> list[dict[str, Value]]:
    """The sums of the rows that agree in these names, in the order of the names."""
    groups: dict[tuple[str, ...], list[UsageRow]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return [{**dict(zip(names, key, strict=True)), **_counts(groups[key])} for key in sorted(groups)]


def _print_csv(names: Sequence[str], lines: Sequence[dict[str, Value]]) -> None:
    from csv import DictWriter

    from agentspec.cache.usage import COUNTS

    writer = DictWriter(sys.stdout, [*names, *COUNTS], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in line.items()} for line in lines)


def _no_formula(value: Value) -> Value:
    """A name that a spreadsheet would take for a formula is marked as text."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _print_table(names: Sequence[str], lines: Sequence[dict[str, Value]], total: dict[str, int]) -> None:
    if not lines:
        typer.echo("no usage is stored: a gateway with [[server.api_keys]] and this cache.path stores it")
        return
    head = [*names, *(name.removesuffix("_tokens") for name in total)]
    last = ["total", *[""] * (len(names) - 1), *(f"{value:,}" for value in total.values())]
    shown = [
        [f"{value:,}" if isinstance(value, int) else _printable(value) for value in line.values()] for line in lines
    ]
    rows = [head, *shown, last]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        cells = [
            cell.ljust(width) if column < len(names) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())


def _printable(name: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in name) or "-"
