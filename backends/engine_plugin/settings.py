"""Settings of the drafter in an engine's server, as environment variables, since the server has its own options.

`engine` is the name of the engine in the variables that each engine has for itself: `VLLM` or `SGLANG`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from agentspec.cache.settings import CacheSettings
from agentspec.errors import ConfigurationError
from agentspec.settings_model import SettingsModel

PREFIX = "AGENTSPEC_"
CACHE = f"{PREFIX}CACHE__"
POLICIES = f"{PREFIX}POLICIES"
LOCATIONS = (f"{PREFIX}CACHE_PATH", f"{PREFIX}STORE_URL", f"{CACHE}PATH")


class DrafterSettings(SettingsModel):
    """Read with `read_settings`."""

    tenant: str = Field(default="default", min_length=1, description="Whom the server belongs to; `AGENTSPEC_TENANT`")
    namespace: str = Field(default="", description="Names the model, for all servers of it; `AGENTSPEC_NAMESPACE`")
    salts: dict[str, Annotated[str, Field(min_length=1)]] = Field(
        default={}, description="Tenant of each `cache_salt` that is known, as JSON; `AGENTSPEC_<engine>_SALTS`"
    )
    policies: int | None = Field(
        default=None,
        ge=1,
        description="Draft from what the model wrote with its present weights and so many before; `AGENTSPEC_POLICIES`",
    )
    cache: CacheSettings = Field(default=CacheSettings(), description="`AGENTSPEC_CACHE__KEY`, and the location")


def enabled(engine: str, environment: Mapping[str, str] = os.environ, *, default: bool = True) -> bool:
    """Whether our drafter takes the place of the engine's own. Raises `ConfigurationError` if the switch is neither."""
    switch = f"{PREFIX}{engine}"
    chosen = environment.get(switch, "on" if default else "off").lower()
    if chosen not in ("on", "1", "true", "off", "0", "false"):
        raise ConfigurationError(f"{switch} must be on or off, not {chosen!r}")
    return chosen in ("on", "1", "true")


def default_config(engine: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What an engine speculates with if its program does not say; empty: it does not. Raises `ConfigurationError`."""
    text = environment.get(name := f"{PREFIX}{engine}_SPECULATIVE_CONFIG", "{}")
    if not isinstance(config := _json(name, text), dict):
        raise ConfigurationError(f'{name} must be a JSON object such as {{"method": "suffix"}}, not {text!r}')
    return config


def read_settings(engine: str, environment: Mapping[str, str] = os.environ) -> DrafterSettings:
    """The settings. Raises `ConfigurationError`, naming the variable, for an invalid value."""
    values: dict[str, Any] = {"cache": _cache(environment)}
    for key in ("tenant", "namespace", "policies"):
        if given := environment.get(f"{PREFIX}{key.upper()}"):
            values[key] = given
    if salts := environment.get(name := f"{PREFIX}{engine}_SALTS"):
        values["salts"] = _json(name, salts)
        if not isinstance(values["salts"], dict):
            raise ConfigurationError(f'{name} must be a JSON object such as {{"salt": "tenant"}}')
    try:
        return DrafterSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"][0] == "salts":  # the place of the error is a salt, which stays out of logs
            raise ConfigurationError(f"{PREFIX}{engine}_SALTS: a tenant is wrong: {first['msg']}") from None
        wrong = first.get("ctx", {}).get("wrong", {"": first["msg"]})  # the keys that `SettingsModel` refuses
        key, reason = next(iter(wrong.items()))
        name = "__".join(str(part).upper() for part in (*first["loc"], key) if part != "")
        raise ConfigurationError(f"{PREFIX}{name}: {reason}") from None


def _cache(environment: Mapping[str, str]) -> dict[str, Any]:
    """The values of the `AGENTSPEC_CACHE__KEY` variables, by key. Lists are given as JSON."""
    single = [name for name in environment if name.startswith(f"{PREFIX}CACHE_") and name not in LOCATIONS]
    values: dict[str, Any] = {}
    for name in single:
        key = name.removeprefix(CACHE)
        if key == name:
            key = name.removeprefix(f"{PREFIX}CACHE_")
            raise ConfigurationError(f"{name}: write {CACHE}{key}, with two underscores")
        value = environment[name]
        values[key.lower()] = _json(name, value) if value.lstrip().startswith("[") else value
    places = {name: environment[name] for name in LOCATIONS if environment.get(name)}
    if len(set(places.values())) > 1:
        raise ConfigurationError(f"{' and '.join(places)} differ: set one, it is where the cache is kept")
    return values | ({"path": next(iter(places.values()))} if places else {})


def _json(name: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}: not valid JSON: {error}") from None
