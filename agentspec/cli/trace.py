"""`agentspec trace` shows kept runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from agentspec.cli.cache import PathOption, folder_of
from agentspec.cli.common import ConfigOption, command_group, load, print_json, writable
from agentspec.types import DEFAULT_TENANT

MEMORY = 1 << 20  # bytes; runs are not in the index

app = command_group("Look at kept runs (cache.runs_bytes).")


@app.command()
def show(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Name of its session, or id of its only call")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Tenant whose run it is")] = DEFAULT_TENANT,
    html: Annotated[Path | None, typer.Option(help="File to write, a page of its own", callback=writable)] = None,
    config: ConfigOption = None,
    path: PathOption = None,
) -> None:
    """Print a run as JSON, or write it to one file of HTML; without a RUN, list the newest ones."""
    from agentspec.cache import SuffixCache
    from agentspec.proxy.ui.html import one_file
    from agentspec.proxy.ui.runs import MOST_CALLS, listed, read_run

    if html is not None and run is None:
        raise typer.BadParameter("name the run to write to the file", param_hint="RUN")
    settings = load(config)
    folder, retention = folder_of(settings, path), settings.cache.runs_retention
    with SuffixCache.open(folder, mode="follower", memory_bytes=MEMORY, runs_retention=retention) as cache:
        if run is None:
            for one in listed(cache.runs.newest(tenant, MOST_CALLS)):
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["last"]))
                typer.echo(f"{at}  {one['calls']:>4} calls  {one['tokens']:>7} tokens  {one['id']}")
            return
        found = read_run(cache, tenant, run)
    if html is None:
        print_json(found)
    else:
        html.write_text(one_file(found), "utf-8")
