"""`agentspec bench opening`: how soon a new node of a shared cache is warm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentspec.cli.publish import publish


def opening(
    address: Annotated[str, typer.Argument(help="An empty database: postgresql://user@host/name; it is filled")],
    remote: Annotated[str, typer.Argument(help="Folder or URL for the segments: s3://bucket/prefix")],
    tokens: Annotated[int, typer.Option(help="Tokens in the cache", min=10_000)] = 10_000_000,
    rounds: Annotated[int, typer.Option(help="Nodes of each kind that are opened", min=1)] = 3,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file")] = None,
) -> None:
    """Fill a cache on a database server, and open new nodes with published segments and without."""
    from agentspec.benchmarks.cache.opening import run_opening

    publish(lambda progress: run_opening(address, remote, tokens, rounds, progress), json, packages=("numpy",))
