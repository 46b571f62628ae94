"""`agentspec serve` runs the gateway."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from agentspec.cli.common import ConfigOption, load


def serve(
    context: typer.Context,
    config: ConfigOption = None,
    model: Annotated[str | None, typer.Option(help="Serve only this model: a name, folder or GGUF file")] = None,
    upstream: Annotated[str | None, typer.Option(help="Serve only this OpenAI-compatible endpoint, a /v1 URL")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one [default: 8700]")] = None,
    store: Annotated[
        bool | None, typer.Option("--store/--no-store", help="Keep what requests wrote [default: --store]")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Least severe messages to log")
    ] = "info",
) -> None:
    """Run the OpenAI-compatible gateway until SIGTERM, which drains it.

    An upstream's API key comes from AGENTSPEC_BACKENDS__UPSTREAM__API_KEY.
    """
    if context.args:
        raise typer.BadParameter("write --model {0}, or --upstream URL, not {0!r} alone".format(*context.args))
    if model is not None and upstream is not None:
        raise typer.BadParameter("give --model or --upstream, not both; a configuration file can name several backends")
    backends = _backends(model, upstream)
    overrides = {"server": _given(host=host, port=port), "cache": _given(store=store), "backends": backends}
    settings = load(config, overrides, only_overridden_backends=bool(backends))

    from agentspec.proxy.serving import serve as run

    run(settings, log_level=log_level.upper())


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _backends(model: str | None, upstream: str | None) -> dict[str, Any]:
    if model is not None:
        return {"local": {"kind": "torch", "model": model}}
    if upstream is not None:
        return {"upstream": {"kind": "openai", "base_url": upstream}}
    return {}
