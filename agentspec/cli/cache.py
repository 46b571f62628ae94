"""`agentspec cache`: what the token cache holds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from agentspec.cli.common import ConfigOption, JsonOption, load, print_json

app = typer.Typer(help="Look into the token cache.", no_args_is_help=True)


@app.callback()
def cache() -> None:
    """Look into the token cache."""


@app.command()
def stats(
    config: ConfigOption = None,
    path: Annotated[Path | None, typer.Option(help="The cache's folder [default: cache.path]")] = None,
    json: JsonOption = False,
) -> None:
    """Print how much the cache on disk holds. It may be in use by a server meanwhile."""
    from agentspec.cache import SuffixCache
    from agentspec.errors import ConfigurationError

    folder = load(config).cache.path if path is None else path.expanduser()
    if folder is None:
        raise ConfigurationError("the cache is in memory only; set cache.path or give --path")
    if not folder.is_dir():
        raise ConfigurationError(f"there is no cache at {str(folder)!r}; a server with this cache.path creates it")
    with SuffixCache.open(folder, mode="follower") as opened:
        values = asdict(opened.stats())
    if json:
        print_json(values)
        return
    for name, value in values.items():
        typer.echo(f"{name:<16} {value}")
