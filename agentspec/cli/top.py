"""`agentspec top` watches gateways at a terminal: what their page shows as *Now*, a column for each."""

from __future__ import annotations

import json as json_
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from agentspec.cli.common import FAILED, ConfigOption, JsonOption, load, print_json
from agentspec.cli.launch import KEY_VARIABLE, address_of
from agentspec.errors import ConfigurationError, UpstreamError

if TYPE_CHECKING:
    from rich.table import Table

AGAIN = 3.0  # seconds until a gateway that does not answer is asked again
_SILENT = 30.0  # seconds without an event
_ADVICE = {
    401: f"set {KEY_VARIABLE} to an operator's key",
    403: f"{KEY_VARIABLE} must be an operator's key (role in server.api_keys)",
    404: "its page is turned off (server.ui), or this is no gateway",
}
_Event = Mapping[str, Any]


def top(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", help="Gateways [default: that of the settings, http://127.0.0.1:8700]"),
    ] = None,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> None:
    """Watch one gateway or several until Ctrl-C: requests, tokens, accepted drafts, queues, memory, upstreams.

    Gateways with keys get the one in AGENTSPEC_API_KEY, which must be an operator's. With --json, or without a
    terminal, the figures are printed once.
    """
    if wrong := [url for url in urls or () if not url.startswith(("http://", "https://"))]:
        raise ConfigurationError(f"a gateway's URL must begin with http:// or https://, not {wrong[0]!r}")
    bases = [url.rstrip("/").removesuffix("/v1") for url in urls or [address_of(load(config).server)]]
    once = json or not os.isatty(1)
    shown = anyio.run(_watched, list(dict.fromkeys(bases)), once)
    if json:
        print_json({base: event.get("now", event) for base, event in shown.items()})
    else:
        from rich.console import Console

        Console().print(_table(shown))
    if any("error" in event for event in shown.values()):
        raise typer.Exit(FAILED)


async def _watched(bases: Sequence[str], once: bool) -> dict[str, _Event]:
    """Show what the gateways send until Ctrl-C, or, `once`, return the first event of each."""
    from rich.live import Live

    shown: dict[str, _Event] = {base: {} for base in bases}
    live = Live(_table(shown), auto_refresh=False, screen=True)

    async def follow(base: str) -> None:
        while True:
            async with aclosing(_events(base)) as events:
                async for event in events:
                    shown[base] = event
                    if once:
                        return
                    live.update(_table(shown), refresh=True)
            await anyio.sleep(AGAIN)

    with nullcontext() if once else live:
        async with anyio.create_task_group() as tasks:
            for base in bases:
                tasks.start_soon(follow, base)
    return shown


async def _events(base: str) -> AsyncGenerator[_Event]:
    """The events of a gateway's stream; where it ends or does not begin, an event with the `error` is the last."""
    from agentspec.backends.http import Endpoint
    from agentspec.backends.settings import OpenAISettings
    from agentspec.protocol.wire import SseDecoder

    settings = {"base_url": f"{base}/v1", "api_key": os.environ.get(KEY_VARIABLE), "read_timeout": _SILENT}
    endpoint, decoder = Endpoint(OpenAISettings.model_validate(settings)), SseDecoder()
    try:
        async with endpoint.send("GET", "/ui/data/now", headers={}, above=True, probing=True) as response:
            if not response.is_stream:
                advice = _ADVICE.get(response.status, "try again later")
                yield {"error": f"it answers {response.status}: {advice}"}
                return
            async with aclosing(response.aiter_raw()) as pieces:
                async for piece in pieces:
                    for data in decoder.feed(piece):
                        yield json_.loads(data)
        yield {"error": "it ended"}
    except UpstreamError as error:
        yield {"error": error.message}
    finally:
        await endpoint.aclose()


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.1f} MiB"


_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("requests/s", "requests", "{:,.1f}".format),
    ("failed/s", "failed", "{:,.1f}".format),
    ("running", "running", "{:,.0f}".format),
    ("waiting", "queued", "{:,.0f}".format),
    ("tokens/s", "tokens", "{:,.1f}".format),
    ("tokens a step", "tokens_per_step", "{:.2f}".format),
    ("to the first token", "first_token", "{:.3f} s".format),
    ("memory", "memory", _mebibytes),
    ("of it token index", "index", _mebibytes),
)


def _table(shown: Mapping[str, _Event]) -> Table:
    from rich.table import Column, Table
    from rich.text import Text

    table = Table("", *(Column(Text(base.partition("//")[2])) for base in shown), box=None, pad_edge=False)
    figures = [event.get("now", {}) for event in shown.values()]
    for title, name, write in _ROWS:
        table.add_row(title, *("-" if now.get(name) is None else write(now[name]) for now in figures))
    accepted = [now.get("acceptance", {}) for now in figures]
    for source in dict.fromkeys(name for shares in accepted for name in shares):
        kept = (shares.get(source) for shares in accepted)
        table.add_row(f"accepted, {source}", *("-" if share is None else f"{share:.0%}" for share in kept))
    states = (Counter(str(one["state"]) for one in now.get("members", ())) for now in figures)
    table.add_row("upstreams", *(", ".join(f"{n} {state}" for state, n in one.items()) or "-" for one in states))
    table.add_row("", *(Text(event.get("error", ""), "red") for event in shown.values()))
    return table
