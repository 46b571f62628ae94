"""`agentspec model` fetches models and shows where they are stored."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from agentspec.cli.common import JsonOption, print_json

app = typer.Typer(help="Fetch models and find where they lie.", no_args_is_help=True)

Reference = Annotated[
    str, typer.Argument(metavar="NAME", help="Built-in name, folder, GGUF file or model-hub id (org/name)")
]


@app.command()
def fetch(name: Reference) -> None:
    """Fetch a model, verify and prepare it; one that is there already is checked byte by byte."""
    from agentspec.backends.model_store import BUILTIN, fetch

    if name in BUILTIN and BUILTIN[name].notice:
        typer.echo(BUILTIN[name].notice, err=True)
    typer.echo(fetch(name).folder)


@app.command()
def path(name: Reference) -> None:
    """Print the folder of a model that is ready to load, without fetching anything."""
    from agentspec.backends.model_store import locate
    from agentspec.errors import ModelUnavailableError

    files = locate(name)
    if files is None:
        raise ModelUnavailableError(f"model {name!r} is not ready; run: agentspec model fetch {name}")
    typer.echo(files.folder)


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
