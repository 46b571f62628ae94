"""`agentspec fleet`: shows the servers behind a running gateway."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentspec.cli.common import JsonOption, print_json
from agentspec.errors import ConfigurationError, UpstreamError, UpstreamStatusError

if TYPE_CHECKING:
    from agentspec.backends.http.endpoint import Endpoint

app = typer.Typer(no_args_is_help=True, help="Show several servers of one model.")
UrlOption = Annotated[str, typer.Option(help="Address of the gateway")]
KeyOption = Annotated[
    Path | None, typer.Option(help="File with an operator's key, if the gateway has keys", dir_okay=False)
]
LOCAL = "http://127.0.0.1:8700"
SECONDS = 10.0
_COLUMNS = ("member", "state", "in_flight", "running", "waiting", "kv_use", "calls", "retries", "failures")


@app.command()
def status(url: UrlOption = LOCAL, key_file: KeyOption = None, json: JsonOption = False) -> None:
    """Show each server: its state, its calls, and how busy it is by its own metrics."""
    members = _members(url, key_file)
    if json:
        print_json(members)
        return
    rows = [_COLUMNS, *([_shown(member[name]) for name in _COLUMNS] for member in members)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _members(url: str, key_file: Path | None) -> list[dict[str, Any]]:
    """The servers as the gateway lists them. Raises `UpstreamError`."""
    import anyio

    endpoint = _endpoint(url, key_file)

    async def run() -> bytes:
        try:
            return await endpoint.fetch("GET", "/fleet", above=True, timeout=SECONDS)
        finally:
            await endpoint.leave_loop()

    try:
        members: list[dict[str, Any]] = jsonlib.loads(anyio.run(run))["members"]
        return members
    except UpstreamStatusError:
        raise
    except UpstreamError as error:
        raise UpstreamError(f"{error}; start a gateway there, or name another with --url") from error
    except (ValueError, LookupError, TypeError):
        raise UpstreamError(f"{url} is no gateway of agentspec; name one with --url") from None


def _endpoint(url: str, key_file: Path | None) -> Endpoint:
    from pydantic import ValidationError

    from agentspec.backends.http.endpoint import Endpoint
    from agentspec.backends.settings import OpenAISettings

    key = None if key_file is None else str(key_file)
    try:
        return Endpoint(OpenAISettings.model_validate({"base_url": url, "api_key_file": key}))
    except ValidationError as error:
        raise ConfigurationError(f"--url {url}: {error.errors()[0]['msg']}") from None


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
