"""`agentspec model fetch` fetches a model, or lists the built-in ones."""

from __future__ import annotations

from typing import Annotated

import typer

from agentspec.cli.common import command_group

app = command_group("Fetch models, and list the built-in ones.")


@app.command()
def fetch(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Built-in name, folder, GGUF file or model-hub id (org/name)")
    ] = None,
) -> None:
    """Fetch a model, verify and prepare it, and print its folder; without NAME, list the built-in models."""
    from agentspec.backends.model_store import BUILTIN, locate, resolve

    if name is not None:
        typer.echo(str(resolve(name).folder))
        return
    for one in BUILTIN.values():
        state, size = "not fetched" if locate(one.name) is None else "ready", f"{one.size / 1e6:.0f} MB"
        typer.echo(f"{one.name:<14} {state:<12} {size:>8}  {one.description}")
