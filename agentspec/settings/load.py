"""Settings of the whole application: combines the settings of all packages and records each value's source.

Priority: flags over environment over file over defaults. The variable `AGENTSPEC_SECTION__KEY` sets any value
(`AGENTSPEC_BACKENDS__LOCAL__DEVICE=cpu`), and `AGENTSPEC_CACHE_PATH` also sets `cache.path`.
Secrets come from the environment or from key files only; a secret in the configuration file is refused, because such
files are copied and committed.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag, ValidationError, model_validator

from agentspec.backends.settings import BackendSettings, FleetSettings, OpenAISettings, TorchSettings
from agentspec.cache.settings import CacheSettings, without_password
from agentspec.errors import ConfigurationError, suggestion
from agentspec.reasoning.settings import STRATEGIES, KnowledgeSettings, StrategySettings
from agentspec.settings.models import ModelSettings
from agentspec.settings.server import ServerSettings

PREFIX = "AGENTSPEC_"
CONFIG_VARIABLE = "AGENTSPEC_CONFIG"
ALIASES = {"AGENTSPEC_CACHE_PATH": "AGENTSPEC_CACHE__PATH"}
"""Additional variable names, which plug-ins in other programs use."""
Key = tuple[str, ...]
SourceKind = Literal["flag", "env", "file", "default"]


def _strategy_of(table: Any) -> str:
    """The tag of the settings class for a [models.NAME] table."""
    found = table.get("strategy") if isinstance(table, Mapping) else getattr(table, "strategy", None)
    return "plain" if found is None else str(found)


if TYPE_CHECKING:
    AnyModel = ModelSettings | StrategySettings
else:
    _KINDS = {"plain": ModelSettings, **STRATEGIES}
    AnyModel = Annotated[
        Union[tuple(Annotated[settings, Tag(name)] for name, settings in _KINDS.items())],  # noqa: UP007
        Discriminator(_strategy_of),
    ]


def _default_backends() -> dict[str, BackendSettings]:
    return {"local": TorchSettings()}


class Settings(BaseModel):
    """All settings. Build them with `load_settings`; `Settings()` has the defaults.

    If no backend is configured, the backend `local` runs the default model. If no model is configured, clients reach
    each backend's model under its own name. Only `load_settings` reads the environment, and applies the priorities.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: ServerSettings = Field(default_factory=ServerSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    backends: dict[str, BackendSettings] = Field(default_factory=_default_backends)
    models: dict[str, AnyModel] = Field(default_factory=dict)
    knowledge: dict[str, KnowledgeSettings] = Field(default_factory=dict)
    fleet: FleetSettings = Field(default_factory=FleetSettings)
    model_aliases: dict[str, str] = Field(
        default_factory=dict,
        description="Further names of models, for clients with names built in; one that ends in * is for all that begin"
        " so",
    )

    _origins: dict[Key, tuple[SourceKind, str]] = PrivateAttr(default_factory=dict)

    def origin(self, key: Key) -> tuple[SourceKind, str]:
        """The kind of source that set `key`, and the name of the variable or file."""
        return self._origins.get(key, ("default", ""))

    def set_origins(self, origins: Mapping[Key, tuple[SourceKind, str]]) -> None:
        self._origins.update(origins)

    @property
    def names_models(self) -> bool:
        """Whether a file, a variable or a flag says anything of backends or models."""
        return any(key[0] in ("backends", "models") for key in self._origins)

    @model_validator(mode="after")
    def _tenants_are_kept_apart(self) -> Self:
        for name, backend in self.backends.items():
            if not isinstance(backend, OpenAISettings) or backend.shared_upstream or len(self.server.tenant_names) < 2:
                continue
            if backend.server_kind == "other":
                raise ValueError(
                    f"backends.{name} is neither vLLM nor SGLang, so it cannot keep the caches of the tenants of"
                    f" server.api_keys apart: set backends.{name}.shared_upstream = true if they may share them"
                )
        return self

    @model_validator(mode="after")
    def _models_have_backends(self) -> Self:
        for name, model in self.models.items():
            if isinstance(model, StrategySettings):
                self._check_roles(name, model)
            else:
                self._check_backends(name, model)
        return self

    def _check_backends(self, name: str, model: ModelSettings) -> None:
        """A plain model's backends exist. In a pool they are upstreams."""
        for backend in model.sources:
            key = "backend" if model.backends is None else "backends"
            if backend not in self.backends:
                raise ValueError(f"models.{name}.{key} {_names_no(backend, 'backend', self.backends)}")
            if model.backends and self.backends[backend].local:
                raise ValueError(
                    f"models.{name}.{key} = {backend!r}: only backends of kind openai are placed by a pool"
                )

    def _check_roles(self, name: str, strategy: StrategySettings) -> None:
        """A strategy's models are plain ones: a [models.NAME] table without a strategy, or a backend."""
        plain = [other for other, model in self.models.items() if isinstance(model, ModelSettings)]
        known = dict.fromkeys([*plain, *self.backends])
        for role, value in strategy.models.items():
            if value not in known:
                raise ValueError(f"models.{name}.{role} {_names_no(value, 'plain model and no backend', known)}")
        base: str | None = getattr(strategy, "knowledge", None)
        if base is not None and base not in self.knowledge:
            raise ValueError(f"models.{name}.knowledge {_names_no(base, '[knowledge.NAME] table', self.knowledge)}")


def _names_no(value: str, wanted: str, known: Collection[str]) -> str:
    """Says that the value of a key should be one of `known`."""
    return f"= {value!r} names no {wanted}; configured: {', '.join(known) or 'none'}{suggestion(value, known)}"


def load_settings(
    path: Path | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    only_overridden_backends: bool = False,
) -> Settings:
    """Layer `overrides` (flags) over the environment over the file over the defaults.

    `path` defaults to `$AGENTSPEC_CONFIG`; without either no file is read. `only_overridden_backends` drops every
    backend that `overrides` does not name, and all model names, as `--model` and `--upstream` require.
    Raises `ConfigurationError` naming the file or variable, the key and what to change.
    """
    path = path or os.environ.get(CONFIG_VARIABLE) or None
    path = None if path is None else Path(path)
    flags = dict(overrides or {})
    file = read_file(path) if path is not None else {}
    refuse_secrets(file, path)
    environment = _read_environment(file)
    if only_overridden_backends:
        file, environment = (_keep_backends(layer, flags.get("backends", {})) for layer in (file, environment))
    merged: dict[str, Any] = {}
    origins: dict[Key, tuple[SourceKind, str]] = {}
    _overlay(merged, file, origins, "file", str(path))
    _overlay(merged, environment, origins, "env", "")
    _overlay(merged, flags, origins, "flag", "")
    _default_backend(merged)
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        raise ConfigurationError("\n".join(_explain(item, origins) for item in error.errors())) from None
    settings.set_origins(origins)
    return settings


def read_file(path: Path) -> dict[str, Any]:
    """The tables of the file. Raises `ConfigurationError` if it cannot be read or is not TOML."""
    data = b""
    try:
        data = path.expanduser().read_bytes()
        return tomllib.loads(data.decode("utf-8-sig"))  # editors on Windows write a byte order mark
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration file {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"{path}: line {line} is not UTF-8: save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: not valid TOML: nested too deeply") from None


_SECRETS = ("api_key", "password", "secret", "key")


def refuse_secrets(file: Mapping[str, Any], path: Path | None) -> None:
    """Raise `ConfigurationError` for a key or password in the tables of `file`, and say where it belongs."""
    for key, value in _leaves(file):
        named = f"{path}: {'.'.join(key)}"
        reason = "files are copied and committed"
        if key[:2] == ("server", "api_keys") and (len(key) == 3 or key[-1] in _SECRETS):
            advice = "Write [[server.api_keys]] with tenant and key_env (a variable's name) or key_file"
            raise ConfigurationError(f"{path}: server.api_keys must not hold a key itself: {reason}. {advice}")
        if key[-1] in _SECRETS:
            variable = "PGPASSWORD" if key[0] == "cache" else _variable_of(key)
            advice = f"Set {variable}, or name a file in {'.'.join(key)}_file"
            raise ConfigurationError(f"{named} must not be in a configuration file: {reason}. {advice}")
        if isinstance(value, str) and (without_password(value) != value or _has_login(value)):
            name = "password" if key[0] == "cache" else "api_key"
            advice = f"Name a file in {'.'.join(key[:2] if key[0] != 'cache' else key[:1])}.{name}_file"
            raise ConfigurationError(f"{named} must not carry a password: {reason}. {advice}")


def _leaves(value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every value that is no table or list, with its key, in which a position of a list is a number."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield key, value
        return
    for name, child in items:
        yield from _leaves(child, (*key, str(name)))


def _has_login(text: str) -> bool:
    return text.startswith(("http://", "https://")) and "@" in urlsplit(text).netloc


def env_key(name: str) -> str:
    """`name` as an environment variable can spell it: lower-case letters, digits, underscores."""
    return "".join(c if c.isalnum() else "_" for c in name.lower())


def tables(layer: Mapping[str, Any], section: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tables [section.NAME]; other values in the section, written by mistake, are skipped."""
    tables = layer.get(section)
    for name, table in tables.items() if isinstance(tables, Mapping) else ():
        if isinstance(table, Mapping):
            yield name, table


def _read_environment(file: Mapping[str, Any]) -> dict[str, Any]:
    """`AGENTSPEC_SECTION__KEY` variables as nested tables. Names match those in `file` without case and punctuation."""
    # Only names with a double underscore are settings: AGENTSPEC_MODELS, the store's folder, is not the `models` table.
    merged: dict[str, Any] = {}
    for name in filter(_is_setting, os.environ):
        layer: Any = _value(name)
        for key in reversed(_unaliased(name)[len(PREFIX) :].lower().split("__")):
            layer = {key: layer}
        _overlay(merged, layer, {}, "env", name)
    for section in ("backends", "models", "knowledge"):
        written = {env_key(name): name for name, _ in tables(file, section)}
        if section in merged:
            merged[section] = {written.get(name, name): table for name, table in merged[section].items()}
    return merged


def _value(name: str) -> Any:
    """What the variable says: a list or a table as JSON, anything else as it is."""
    text = os.environ[name].strip()
    try:
        return json.loads(text) if text.startswith(("[", "{")) else os.environ[name]
    except ValueError:
        raise ConfigurationError(f"{name}: not valid; lists are written as JSON, [...]") from None


def _unaliased(name: str) -> str:
    """The variable that an alias stands for. Raises `ConfigurationError` if both are set and differ."""
    full = ALIASES.get(name.upper(), name)
    if full != name and os.environ.get(full, os.environ[name]) != os.environ[name]:
        raise ConfigurationError(f"{name} and {full} differ: unset one of them, they mean the same setting")
    return full


def _is_setting(name: str) -> bool:
    """Whether the variable is a setting. Refuses misspelt ones: `AGENTSPEC_SERVR__PORT`, `AGENTSPEC_CACHE_STORE`."""
    if not name.upper().startswith(PREFIX):
        return False
    if name.upper() in ALIASES:
        return True
    rest = name[len(PREFIX) :].lower()
    section, double, _ = rest.partition("__")
    if double and section not in Settings.model_fields:
        raise ConfigurationError(f"{name}: no section {section!r}{suggestion(section, Settings.model_fields)}")
    section, single, key = rest.partition("_")
    if not double and single and section in ("server", "cache", "backends", "fleet"):
        known = getattr(Settings.model_fields[section].annotation, "model_fields", {key: None})
        nearest = "" if key in known else suggestion(key, known)
        written = f"{PREFIX}{section.upper()}__{key.upper()}"
        raise ConfigurationError(f"{name}: write {written}, with two underscores{nearest}")
    return bool(double)


def _keep_backends(layer: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    wanted_tables = {name: table for name, table in tables(layer, "backends") if name in wanted}
    return {key: value for key, value in layer.items() if key not in ("backends", "models")} | {
        "backends": wanted_tables
    }


def _default_backend(merged: dict[str, Any]) -> None:
    """Add the backend `local` if there is none, and its kind, which the environment and flags need not repeat."""
    if not merged.get("backends"):
        merged["backends"] = {"local": {}}
    local = merged["backends"].get("local") if isinstance(merged["backends"], dict) else None
    if isinstance(local, dict):
        local.setdefault("kind", "torch")


def _overlay(
    target: dict[str, Any],
    layer: Mapping[str, Any],
    origins: dict[Key, tuple[SourceKind, str]],
    source: SourceKind,
    origin: str,
    parents: Key = (),
) -> None:
    for name, value in layer.items():
        key = (*parents, name)
        if isinstance(value, Mapping):
            child = target.get(name)
            if child is not None and not isinstance(child, Mapping) and _is_section(key):
                continue  # refused later: a table in its place would drop what it says, such as the keys of [[server]]
            target[name] = child = dict(child) if isinstance(child, Mapping) else {}
            _overlay(child, value, origins, source, origin, key)
        else:
            target[name] = value
            origins[key] = (source, origin or (_variable(key) if source == "env" else ""))


def _is_section(key: Key) -> bool:
    """Whether nothing but a table can stand there."""
    return len(key) == 1 or (len(key) == 2 and key[0] in ("backends", "models", "knowledge"))


def _variable_of(key: Key) -> str:
    return PREFIX + "__".join(env_key(part).upper() for part in key)


def _variable(key: Key) -> str:
    """The environment variable that set `key`."""
    name = _variable_of(key)
    alias = next((alias for alias, long in ALIASES.items() if long == name), name)
    return alias if name not in os.environ and alias in os.environ else name


# What the tables of a section can be, where one of them is none of these.
_KINDS = {
    "backends": ': set kind = "torch" (a local model), "encoder" (an embedding model) or "openai" (an endpoint)',
    "models": f".strategy: must be one of {', '.join(STRATEGIES)}; leave it out for a plain model",
    "knowledge": ': set kind = "index" (a folder) or kind = "remote" (a service)',
}

# In place of pydantic's own words where these do not say what to write.
_ADVICE = {
    "byte_size": 'must be bytes, or text such as "512MiB"',
    "byte_size_unit": 'must be bytes, or text such as "512MiB"',
    "url_parsing": "must be a whole address, such as http://host:8000/v1",
    "url_scheme": "must be a whole address, such as http://host:8000/v1",
}


def _explain(item: Any, origins: Mapping[Key, tuple[SourceKind, str]]) -> str:
    """One pydantic error, a line for each key: the value's source, the key, what is wrong and what would be right."""
    location = [str(part) for part in item["loc"]]
    if location[:1] in (["backends"], ["models"], ["knowledge"]) and len(location) > 2:
        del location[2]  # pydantic names the member of the union here
    key = tuple(location)
    name = f"{_where(key or ('models',), origins)}{'.'.join(key)}"
    message = item["msg"].removeprefix("Value error, ")
    match item["type"]:
        case "wrong_keys":
            wrong = {(*key, name): reason for name, reason in item["ctx"]["wrong"].items()}
            return "\n".join(f"{_where(one, origins)}{'.'.join(one)}: {reason}" for one, reason in wrong.items())
        case "extra_forbidden":
            known = Settings.model_fields
            return f"{name}: unknown key{suggestion(key[-1], known) or '; known: ' + ', '.join(known)}"
        case "missing":
            return f"{name}: missing; it must be given"
        case "union_tag_invalid" | "union_tag_not_found":
            return f"{name}{_KINDS[key[0]]}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{name} = {item['input']!r}: must be a table"
        case "value_error":
            return f"{name}: {message}" if key else f"{name}{message}"
    secret = "api_key" in key[-1] or key[-1] in ("password", "secret")
    value = "" if secret else f" = {without_password(str(item['input']))!r}"
    return f"{name}{value}: {_ADVICE.get(item['type'], message)}"


def _where(key: Key, origins: Mapping[Key, tuple[SourceKind, str]]) -> str:
    """The file or variable that sets `key`, or else the source of another key in the same table."""
    nearest = [known for known in origins if known[: len(key)] == key or key[: len(known)] == known]
    found = nearest or [known for known in origins if known[:-1] == key[:-1]]
    source, origin = origins[found[0]] if found else ("default", "")
    return {"file": f"{origin}: ", "env": f"{origin}: ", "flag": "command line: ", "default": ""}[source]
