"""`agentspec model fetch` fetches a model, or lists the built-in ones."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from agentspec.cli.common import JsonOption, print_json

app = typer.Typer(help="Fetch models, and list the built-in ones.", no_args_is_help=True)


@app.callback()
def model() -> None:
    """Fetch models, and list the built-in ones."""


@app.command()
def fetch(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Built-in name, folder, GGUF file or model-hub id (org/name)")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Fetch a model, verify and prepare it, and print its folder; without NAME, list the built-in models."""
    from agentspec.backends.model_store import BUILTIN, resolve

    if name is None:
        _list(json)
        return
    if name in BUILTIN and BUILTIN[name].notice:
        typer.echo(BUILTIN[name].notice, err=True)
    folder = str(resolve(name).folder)
    if json:
        print_json({"folder": folder})
    else:
        typer.echo(folder)


def _list(json: bool) -> None:
    from agentspec.backends.model_store import BUILTIN, locate

    rows: list[dict[str, Any]] = [
        {"name": one.name, "ready": locate(one.name) is not None, "bytes": one.size, "description": one.description}
        for one in BUILTIN.values()
    ]
    if json:
        print_json(rows)
        return
    for row in rows:
        state, size = "ready" if row["ready"] else "not fetched", f"{row['bytes'] / 1e6:.0f} MB"
        typer.echo(f"{row['name']:<14} {state:<12} {size:>8}  {row['description']}")
