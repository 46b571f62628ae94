"""`agentspec cache verify` and `compact`: whether the cache on disk is whole, and making it small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from agentspec.cli.cache.folder import PathOption, folder_of, shown
from agentspec.cli.common import FAILED, ConfigOption, JsonOption, load, print_json


def verify(config: ConfigOption = None, path: PathOption = None, json: JsonOption = False) -> None:
    """Check the database, every sequence and the index built from them; exit code 1 if something is wrong.

    Changes nothing. A server may use the folder meanwhile.
    """
    from rich.console import Console

    from agentspec.cache.check import verify

    settings = load(config)
    folder = folder_of(settings, path)
    with Console(stderr=True).status("starting") as status:
        problems = verify(folder, int(settings.cache.memory_bytes), lambda stage: status.update(f"the {stage}"))
    if json:
        print_json({"ok": not problems, "problems": problems})
    else:
        typer.echo("\n".join(problems) or f"ok: {shown(folder)}")
    if problems:
        raise typer.Exit(FAILED)


def compact(config: ConfigOption = None, path: PathOption = None, json: JsonOption = False) -> None:
    """Give back what the cache on disk does not need. Refused while a server writes to the folder."""
    folder = folder_of(load(config), path)
    before, after = _compact(folder)
    if json:
        values: dict[str, Any] = {"before": before, "disk_bytes": after}
        print_json(values)
        return
    typer.echo(f"{shown(folder)} takes {after} bytes, {before} before")


def _compact(folder: Path | str) -> tuple[int, int]:
    """Bytes on disk before and after."""
    from agentspec.cache import SuffixCache

    with SuffixCache.open(folder, mode="writer") as cache:
        return cache.stats().disk_bytes, cache.compact()
