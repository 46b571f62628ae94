"""`agentspec config` shows the settings and their sources, and checks whether they can work."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from agentspec.cli.common import ConfigOption, JsonOption, config_file, load, print_json

if TYPE_CHECKING:
    from agentspec.settings.effective import EffectiveValue
    from agentspec.settings.load import Settings

app = typer.Typer(help="Show and check the configuration.", no_args_is_help=True)


@app.command()
def show(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Print every setting that applies and where it comes from. Secrets are masked."""
    from agentspec.settings.effective import effective_values

    values = effective_values(load(config))
    if json:
        print_json([asdict(value) for value in values])
        return
    width = max(len(_assignment(value)) for value in values)
    for value in values:
        typer.echo(f"{_assignment(value):<{width}}  # {value.source} {value.origin}".rstrip())


@app.command()
def check(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Check the configuration, the key files and the variables it names; exit code 2 if something cannot work."""
    from agentspec.settings.model_names import unreachable

    settings = load(config)
    _read_secrets(settings)
    file = config_file(config)
    notes = [f"no model name leads to backends.{name}: {advice}" for name, advice in unreachable(settings).items()]
    notes += _without_path(settings)
    if settings.server.api_keys and not any(key.role == "operator" for key in settings.server.api_keys):
        notes.append('nobody can read /metrics: give one of server.api_keys the role "operator"')
    if json:
        found = {"file": None if file is None else str(file), "backends": list(settings.backends), "notes": notes}
        print_json({"ok": True, **found})
        return
    typer.echo(f"ok: {file or 'no configuration file; environment and defaults'}")
    for note in notes:
        typer.echo(f"note: {note}")


def _without_path(settings: Settings) -> list[str]:
    """A note for each upstream with an address that ends behind the host, which is right for few servers."""
    from agentspec.backends.settings import OpenAISettings

    notes = []
    for name, backend in settings.backends.items():
        urls = (backend.base_url, *(backend.base_urls or ())) if isinstance(backend, OpenAISettings) else ()
        if any(url is not None and url.path in (None, "/") for url in urls):
            notes.append(f"the address of backends.{name} ends behind the host: most servers answer below /v1")
    return notes


@app.command()
def salts(config: ConfigOption = None) -> None:
    """Print the salt of each tenant as JSON, for the vLLM and SGLang servers behind this gateway.

    It belongs into their AGENTSPEC_VLLM_SALTS or AGENTSPEC_SGLANG_SALTS. There it lets our drafter draft each tenant's
    requests from what that tenant wrote before. Keep it from clients.
    """
    from agentspec.backends.openai.isolation import TenantIsolation
    from agentspec.errors import ConfigurationError

    server = load(config).server
    if server.secret is None and server.secret_file is None:
        raise ConfigurationError("salts last only with a secret: set AGENTSPEC_SERVER__SECRET or server.secret_file")
    isolation = TenantIsolation(server.read_secret(), required=True)
    print_json({isolation.salt(tenant, None): tenant for tenant in sorted(server.tenant_names)})


def _assignment(value: EffectiveValue) -> str:
    return f"{value.key} = {'unset' if value.value is None else jsonlib.dumps(value.value)}"


def _read_secrets(settings: Settings) -> None:
    """Read every key once, so that a missing key is found now and not at the first request."""
    from agentspec.backends.key_files import read_secret, sendable
    from agentspec.backends.settings import OpenAISettings
    from agentspec.reasoning.retrieval.knowledge.settings import RemoteSettings
    from agentspec.settings.api_keys import read_keys

    settings.cache.location()
    read_keys(settings.server.api_keys)
    settings.server.read_secret()
    for reached in (*settings.backends.values(), *settings.knowledge.values()):
        if isinstance(reached, OpenAISettings | RemoteSettings) and reached.api_key_file is not None:
            sendable(read_secret(reached.api_key_file), f"api_key_file {reached.api_key_file!r}")
