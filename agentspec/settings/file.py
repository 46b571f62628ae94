"""Reads the configuration file and refuses secrets in it, because such files are copied and committed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentspec.cache.settings import without_password
from agentspec.errors import ConfigurationError

PREFIX = "AGENTSPEC_"


def read_file(path: Path) -> dict[str, Any]:
    """The tables of the file. Raises `ConfigurationError` if it cannot be read or is not TOML."""
    try:
        with path.expanduser().open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigurationError(f"cannot read the configuration file {str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: not valid TOML: nested too deeply") from None


def refuse_secrets(file: Mapping[str, Any], path: Path | None) -> None:
    """Raise `ConfigurationError` for a key or password in the tables of `file`, and say where it belongs."""
    cache = file.get("cache")
    cache = cache if isinstance(cache, Mapping) else {}
    if "password" in cache or without_password(location := str(cache.get("path", ""))) != location:
        raise ConfigurationError(
            f"{path}: the password of cache.path must not stand in a file: files are copied and committed."
            f" Set {PREFIX}CACHE__PASSWORD, or name a file in cache.password_file"
        )
    for section, address in (("backends", "base_url"), ("knowledge", "url")):
        for name, table in tables(file, section):
            _refuse_key(f"{path}: {section}.{name}", f"{section}.{name}", table, address)
    server = file.get("server")
    if isinstance(server, dict) and "secret" in server:
        raise ConfigurationError(
            f"{path}: server.secret must not stand in a file: files are copied and committed."
            f" Set {PREFIX}SERVER__SECRET, or name a file in server.secret_file"
        )
    keys = server.get("api_keys") if isinstance(server, dict) else None
    for key in keys if isinstance(keys, list) else []:
        if not isinstance(key, dict) or "key" in key or "api_key" in key:
            raise ConfigurationError(
                f"{path}: server.api_keys must not hold a key itself: files are copied and committed."
                " Write [[server.api_keys]] with tenant and key_env (a variable's name) or key_file"
            )


def _refuse_key(where: str, key: str, table: Mapping[str, Any], address: str) -> None:
    """Refuse a key or a password in the table of a backend or knowledge base that has an `address`."""
    variable = PREFIX + "__".join(env_key(part).upper() for part in (*key.split(".", 1), "api_key"))
    advice = f"files are copied and committed. Set {variable}, or name a file in {key}.api_key_file"
    if "api_key" in table:
        raise ConfigurationError(f"{where}.api_key must not stand in a file: {advice}")
    given = table.get(f"{address}s")
    urls = [table.get(address, ""), *(given if isinstance(given, list) else ())]
    if any("@" in urlsplit(str(url)).netloc for url in urls):
        raise ConfigurationError(f"{where}.{address} must not carry a password: {advice}")


def env_key(name: str) -> str:
    """`name` as an environment variable can spell it: lower-case letters, digits, underscores."""
    return "".join(c if c.isalnum() else "_" for c in name.lower())


def tables(layer: Mapping[str, Any], section: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tables [section.NAME]; other values in the section, written by mistake, are skipped."""
    tables = layer.get(section)
    for name, table in tables.items() if isinstance(tables, Mapping) else ():
        if isinstance(table, Mapping):
            yield name, table
