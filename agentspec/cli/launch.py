"""`agentspec launch` starts Claude Code or Codex against a gateway, with what they need set."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import anyio
import typer

from agentspec.cli.common import ConfigOption, load
from agentspec.errors import ConfigurationError, UpstreamError, UpstreamStatusError, suggestion

if TYPE_CHECKING:
    from agentspec.settings.server import ServerSettings

KEY_VARIABLE = "AGENTSPEC_API_KEY"
_SECONDS = 10.0  # without a byte of the gateway's list of models
_CLAUDE_MODELS = (
    *("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL"),
    *("ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
)
# What would send requests, or an Anthropic key, elsewhere than to the gateway.
_CLAUDE_UNSET = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY")


_PACKAGES = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex"}


def launch(
    agent: Annotated[Literal["claude", "codex"], typer.Argument(metavar="AGENT", help="Which agent to start")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARG", help="Arguments of the agent, after --")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Address of the gateway [default: that of the settings, http://127.0.0.1:8700]")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to use [default: the first one of the gateway]")] = None,
    config: ConfigOption = None,
) -> None:
    """Start Claude Code or Codex against a running gateway: agentspec launch claude -- ARGS.

    Says what it sets, and gives the agent's exit code. A gateway with keys gets the one in AGENTSPEC_API_KEY.
    """
    program = shutil.which(agent)
    if program is None:
        raise ConfigurationError(f"{agent} is not on the PATH; install it: npm install -g {_PACKAGES[agent]}")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"--url must begin with http:// or https://, not {url!r}")
    base = (url or address_of(load(config).server)).rstrip("/").removesuffix("/v1")
    key = os.environ.get(KEY_VARIABLE)
    model = _chosen(anyio.run(_models, base, key), model, base)
    options = _codex(base, model, key) if agent == "codex" else []
    environment = _claude(base, model, key) if agent == "claude" else {}
    removed = [name for name in _CLAUDE_UNSET if agent == "claude" and name in os.environ]
    shown = {name: "****" if value == key else value for name, value in environment.items()}
    for line in (*(f"{name}={value}" for name, value in shown.items()), *(f"-c {one}" for one in options[1::2])):
        typer.echo(f"agentspec: sets {line}", err=True)
    for name in removed:
        typer.echo(f"agentspec: leaves out {name}", err=True)
    sys.stderr.flush()
    passed = {name: value for name, value in os.environ.items() if name not in removed} | environment
    os.execve(program, [agent, *options, *(arguments or ())], passed)  # its signals and exit code are the agent's


def _claude(base: str, model: str, key: str | None) -> dict[str, str]:
    """The variables by which Claude Code reaches the gateway with `model` in all its roles."""
    return {
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_AUTH_TOKEN": key or "none",
        **dict.fromkeys(_CLAUDE_MODELS, model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a text that changes with every request, at the prompt's beginning
    }


def _codex(base: str, model: str, key: str | None) -> list[str]:
    """The options by which Codex reaches the gateway: keys of its configuration with values in TOML."""
    provider = "model_providers.agentspec"
    values = {
        "model": model,
        "model_provider": "agentspec",
        f"{provider}.name": "agentspec",
        f"{provider}.base_url": f"{base}/v1",
        f"{provider}.wire_api": "responses",
        "web_search": "disabled",  # a tool of OpenAI's servers
        **({f"{provider}.env_key": KEY_VARIABLE} if key else {}),
    }
    return [part for name, value in values.items() for part in ("-c", f"{name}={json.dumps(value)}")]


def address_of(server: ServerSettings) -> str:
    """Where a client on this machine reaches a gateway with these settings."""
    if server.port == 0:
        raise ConfigurationError("server.port = 0 takes any free port: name the gateway's address with --url")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{server.port}"


async def _models(base: str, key: str | None) -> list[str]:
    """The models that the gateway at `base` lists. Raises `UpstreamError` where none answers."""
    from agentspec.backends.openai import OpenAIBackend
    from agentspec.backends.settings import OpenAISettings

    settings = {"base_url": f"{base}/v1", "api_key": key, "read_timeout": _SECONDS}
    backend = OpenAIBackend(OpenAISettings.model_validate(settings))
    try:
        return [str(one["id"]) for one in await backend.models()]
    except UpstreamStatusError as error:
        refused = error.status in (401, 403)
        advice = f"set {KEY_VARIABLE} to one of its keys" if refused else "name a gateway's address with --url"
        raise UpstreamError(f"{base}/v1/models answers {error.status}: {advice}") from None
    except UpstreamError as error:
        advice = "start a gateway with `agentspec serve`, or name its address with --url"
        raise UpstreamError(f"{error.message}; {advice}") from None
    finally:
        await backend.aclose()


def _chosen(known: list[str], model: str | None, base: str) -> str:
    """The model to use. Raises `ConfigurationError` for one that the gateway does not list."""
    if model is None and known:
        return known[0]
    if model is None:
        raise ConfigurationError(f"the gateway at {base} lists no model: name one with --model")
    if known and model not in known:
        listed = ", ".join(known[:10]) + (", ..." if len(known) > 10 else "")
        near = suggestion(model, known)
        raise ConfigurationError(f"the gateway at {base} has no model {model!r}{near}; it has: {listed}")
    return model
