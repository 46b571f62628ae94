"""`agentspec config` shows the settings and their sources, and checks them; `agentspec doctor` tries what they name."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentspec.cli.common import FAILED, ConfigOption, JsonOption, command_group, config_file, load, print_json
from agentspec.errors import ConfigurationError

if TYPE_CHECKING:
    from agentspec.cli.doctor import Check
    from agentspec.settings.load import Settings

app = command_group("Show and check the configuration.")
_MARKS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}


@app.command()
def show(
    config: ConfigOption = None,
    json: JsonOption = False,
    salts: Annotated[
        bool, typer.Option("--salts", help="Print tenants' salts instead, for AGENTSPEC_VLLM_SALTS; keep them secret")
    ] = False,
) -> None:
    """Print every setting that applies and where it comes from. Secrets are masked."""
    settings = load(config)
    if salts:
        print_json(_salts(settings))
        return
    values = effective_values(settings)
    if json:
        print_json(values)
        return
    assigned = [f"{one['key']} = {'unset' if one['value'] is None else jsonlib.dumps(one['value'])}" for one in values]
    width = max(map(len, assigned))
    for assignment, one in zip(assigned, values, strict=True):
        typer.echo(f"{assignment:<{width}}  # {one['source']} {one['origin']}".rstrip())


@app.command()
def check(config: ConfigOption = None) -> None:
    """Check the configuration, the key files and the variables it names; exit code 2 if something cannot work."""
    from agentspec.runtime.model_directory import ModelDirectory
    from agentspec.settings.models import unreachable

    settings = load(config)
    ModelDirectory(settings, ())
    _read_secrets(settings)
    notes = [f"no model name leads to backends.{name}: {advice}" for name, advice in unreachable(settings).items()]
    if settings.server.api_keys and not any(key.role == "operator" for key in settings.server.api_keys):
        notes.append('no key can read /metrics: give one of server.api_keys the role "operator"')
    typer.echo(f"ok: {config_file(config) or 'no configuration file; environment and defaults'}")
    for note in notes:
        typer.echo(f"note: {note}")


def doctor(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Check the installation, models, folders and upstreams; exit code 1 if something needed is broken."""
    results = []
    for found in _checks(config):
        results.append(found)
        if not json:
            typer.echo(f"{_MARKS[found.state]}  {found.name}: {found.detail}")
            if found.advice:
                typer.echo(f"      -> {found.advice}")
    if json:
        print_json([asdict(found) for found in results])
    if any(found.state == "fail" for found in results):
        raise typer.Exit(FAILED)


def _checks(config: Path | None) -> Iterator[Check]:
    from agentspec.cli.doctor import Check, all_checks
    from agentspec.settings.load import Settings

    try:
        settings = load(config)
    except ConfigurationError as error:
        yield Check("configuration", "fail", str(error), "correct it; the checks below use the defaults")
        settings = Settings()
    yield from all_checks(settings)


def effective_values(settings: Settings) -> list[dict[str, Any]]:
    """Each effective setting: its dotted `key`, its `value` as JSON data with secrets masked (None: unset), the kind of
    its `source`, and its `origin`, the name of the variable or file, empty for flags and defaults.
    """
    values = []
    for key, value in _leaves(settings.model_dump(mode="json"), ()):
        source, origin = settings.origin(key)
        values.append({"key": ".".join(key), "value": _masked(value), "source": source, "origin": origin})
    return values


def _leaves(value: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every single value below a table of settings, with its key."""
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, child in value.items():
        yield from _leaves(child, (*key, name))


def _masked(value: Any) -> Any:
    """The value without passwords in addresses; pydantic has masked other secrets."""
    from agentspec.cache.settings import without_password

    if isinstance(value, list):
        return [_masked(item) for item in value]
    return without_password(value) if isinstance(value, str) else value


def _salts(settings: Settings) -> dict[str, str]:
    """The tenant of each salt. Raises `ConfigurationError` where salts change at each start."""
    from agentspec.backends.openai.isolation import TenantIsolation

    server = settings.server
    if server.secret is None and server.secret_file is None:
        raise ConfigurationError("salts last only with a secret: set AGENTSPEC_SERVER__SECRET or server.secret_file")
    isolation = TenantIsolation(server.read_secret(), required=True)
    return {isolation.salt(tenant, None): tenant for tenant in sorted(server.tenant_names)}


def _read_secrets(settings: Settings) -> None:
    """Read every key once, so that a missing key is found now and not at the first request."""
    from agentspec.backends.settings import OpenAISettings, read_secret, sendable
    from agentspec.reasoning.settings import RemoteSettings
    from agentspec.settings.server import read_keys

    settings.cache.location()
    read_keys(settings.server.api_keys)
    settings.server.read_secret()
    for reached in (*settings.backends.values(), *settings.knowledge.values()):
        if isinstance(reached, OpenAISettings | RemoteSettings) and reached.api_key_file is not None:
            sendable(read_secret(reached.api_key_file), f"api_key_file {reached.api_key_file!r}")
