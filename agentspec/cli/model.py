"""`agentspec model` fetches models, and lists the built-in ones."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from agentspec.cli.common import JsonOption, print_json

app = typer.Typer(help="Fetch models, and list the built-in ones.", no_args_is_help=True)

Reference = Annotated[
    str, typer.Argument(metavar="NAME", help="Built-in name, folder, GGUF file or model-hub id (org/name)")
]


@app.command()
def fetch(name: Reference) -> None:
    """Fetch a model, verify and prepare it, and print its folder; one that is there is checked byte by byte."""
    from agentspec.backends.model_store import BUILTIN, fetch

    if name in BUILTIN and BUILTIN[name].notice:
        typer.echo(BUILTIN[name].notice, err=True)
    typer.echo(fetch(name).folder)


@app.command("list")
def list_models(json: JsonOption = False) -> None:
    """List the built-in models."""
    from agentspec.backends.model_store import BUILTIN, locate

    rows: list[dict[str, Any]] = [
        {
            "name": model.name,
            "ready": locate(model.name) is not None,
            "bytes": model.size,
            "sha256": model.sha256,
            "description": model.description,
        }
        for model in BUILTIN.values()
    ]
    if json:
        print_json(rows)
        return
    for row in rows:
        state, size = "ready" if row["ready"] else "not fetched", f"{row['bytes'] / 1e6:.0f} MB"
        typer.echo(f"{row['name']:<14} {state:<12} {size:>8}  {row['description']}")
