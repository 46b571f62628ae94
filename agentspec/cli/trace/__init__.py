"""`agentspec trace` shows what a strategy decided for an answer, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentspec.cli.common import ConfigOption, JsonOption, load, print_json, require_writable

if TYPE_CHECKING:
    from agentspec.reasoning.delegation.trace import TraceFolder

app = typer.Typer(help="Show what strategies decided, answer by answer.", no_args_is_help=True)

TraceId = Annotated[str, typer.Argument(metavar="ID", help="The answer's speculation.trace; `last` is the newest")]


@app.command()
def show(
    trace: TraceId,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file instead")] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Print an answer with each step coloured by who wrote it, its score and its time."""
    folder = _folder(config)
    records = folder.read(_named(folder, trace))
    if json:
        print_json(records)
    elif html is not None:
        from agentspec.cli.trace.page import page

        require_writable(html)
        html.write_text(page(records), encoding="utf-8")
    else:
        from rich.console import Console

        from agentspec.cli.trace.page import lines

        console = Console(highlight=False)
        for line in lines(records):
            console.print(line)


@app.command("list")
def list_traces(config: ConfigOption = None) -> None:
    """Print the ids of the traces that are kept, newest first."""
    for name in _folder(config).ids():
        typer.echo(name)


@app.command()
def delete(
    trace: Annotated[str | None, typer.Argument(metavar="[ID]", help="Which one")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them")] = False,
    config: ConfigOption = None,
) -> None:
    """Delete one trace, or all."""
    if (trace is None) is not everything:
        raise typer.BadParameter("name a trace, or give --all")
    folder = _folder(config)
    names = folder.ids() if trace is None else [_named(folder, trace)]
    for name in names:
        folder.delete(name)
    typer.echo(f"{len(names)} deleted")


def _folder(config: Path | None) -> TraceFolder:
    from agentspec.errors import ConfigurationError
    from agentspec.reasoning.delegation.trace import open_folder

    folder = open_folder(load(config).traces)
    if folder is None:
        raise ConfigurationError("no traces are kept: set path in [traces], then ask again")
    return folder


def _named(folder: TraceFolder, trace: str) -> str:
    newest: list[Any] = folder.ids()[:1] if trace == "last" else []
    return newest[0] if newest else trace
