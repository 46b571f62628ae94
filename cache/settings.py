"""Settings of the token cache, composed into the application's settings."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import parse_qs, quote, urlsplit

from pydantic import BeforeValidator, ByteSize, Field, field_validator

from agentspec.errors import ConfigurationError
from agentspec.settings_model import SettingsModel

if TYPE_CHECKING:
    from agentspec.cache.suffix_cache import SuffixCache

_SCHEMES = ("postgresql", "postgresql+psycopg")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_span(value: object) -> object:
    """Text such as `"30d"` in seconds (units s, m, h, d, w); non-text values unchanged. Raises `ValueError`."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*([smhdw]?)\s*", value)
    if match is None:
        raise ValueError(f"{value!r} is no time span; write a number and s, m, h, d or w, such as 30d")
    return float(match[1]) * _UNITS[match[2] or "s"]


Seconds = Annotated[float, BeforeValidator(parse_span)]


def parse_location(value: object) -> object:
    """A database address as text, any other value as the path of a folder. Raises `ValueError` for neither."""
    if not isinstance(value, str | Path):
        raise ValueError("must be a folder, or the address of a database such as postgresql://user@host/name")
    if value == "":
        raise ValueError("must not be empty: name a folder, or leave it out for a cache in memory")
    if "://" not in str(value):
        return Path(value).expanduser()
    scheme = str(value).partition("://")[0]
    if scheme not in _SCHEMES:
        raise ValueError(f"must be a folder, or begin with {' or '.join(f'{known}://' for known in _SCHEMES)}")
    if "password" in parse_qs(urlsplit(str(value)).query):
        raise ValueError("must not carry a password after the question mark")
    return value


Location = Annotated[Path | str, BeforeValidator(parse_location)]


def without_password(url: str) -> str:
    """An address with its password masked; other text unchanged."""
    password = urlsplit(url).password if "://" in url else None
    return url.replace(f":{password}@", ":**********@") if password else url


class CacheSettings(SettingsModel):
    """`[cache]` in agentspec.toml. Without a path the cache lives in memory only and is gone at exit."""

    path: Location | None = Field(
        default=None,
        description="Folder for the sequence database, or `postgresql://user@host/name`; unset: memory only",
    )
    password_file: Path | None = Field(
        default=None, description="File holding the password of the database's user; unset: as libpq finds it"
    )
    memory_bytes: ByteSize = Field(default=ByteSize(512 << 20), gt=0, description="Most memory the index may use")
    disk_bytes: ByteSize | None = Field(default=None, gt=0, description="Most that the database may take; unset: all")
    tenant_memory_bytes: ByteSize | None = Field(
        default=None, gt=0, description="Most memory that one tenant may use, with all its models"
    )
    tenant_disk_bytes: ByteSize | None = Field(
        default=None, gt=0, description="Most that one tenant's sequences may take in the database"
    )
    store: bool = Field(
        default=True,
        description="Store prompts, outputs and their key/value rows; false stores nothing after a request ends",
    )
    retention: Seconds | None = Field(
        default=None, ge=0, description='Delete outputs that are older: seconds, or text such as `"30d"`; unset: none'
    )
    refuse_patterns: tuple[str, ...] = Field(
        default=(), description="Regular expressions; an output with text that matches one is neither stored nor shared"
    )
    responses_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        gt=0,
        description="Size of the stored answers of /v1/responses; at most a quarter of disk_bytes",
    )
    runs_bytes: ByteSize | None = Field(
        default=None,
        gt=0,
        description="Size of kept runs: prompts and answers with the source of each token, for their tenant on the page"
        " /ui; at most a quarter of disk_bytes. Unset: no runs are kept",
    )
    runs_retention: Seconds = Field(
        default=7 * 86400.0, gt=0, description="Delete kept runs that are older than this, or than `retention`"
    )

    @property
    def keeps_runs(self) -> bool:
        return self.store and self.runs_bytes is not None

    def open(self) -> SuffixCache:
        """Open the cache with these settings. Raises what `location` and `SuffixCache.open` raise."""
        from agentspec.cache.suffix_cache import SuffixCache

        return SuffixCache.open(
            self.location(),
            memory_bytes=int(self.memory_bytes),
            disk_bytes=self.disk_bytes,
            tenant_memory_bytes=self.tenant_memory_bytes,
            tenant_disk_bytes=self.tenant_disk_bytes,
            retention=self.retention,
            refuse_patterns=self.refuse_patterns,
            responses_bytes=int(self.responses_bytes),
            runs_bytes=self.runs_bytes,
            runs_retention=self.runs_retention,
        )

    def location(self) -> Path | str | None:
        """`path`, with the password added to an address. Raises `ConfigurationError` if it cannot be read or used."""
        if isinstance(self.path, Path):
            self._require_folder(self.path)
        password = self._read_password()
        if password is None or self.path is None:
            return self.path
        user, at, host = urlsplit(str(self.path)).netloc.rpartition("@")
        if not at or ":" in user:
            raise ConfigurationError(
                "cache.password_file needs a path such as postgresql://user@host/name", param="path"
            )
        return str(self.path).replace(f"{user}@{host}", f"{user}:{quote(password, safe='')}@{host}", 1)

    @staticmethod
    def _require_folder(path: Path) -> None:
        """Raise `ConfigurationError` if `path` is no folder and none can be made there."""
        there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
        if there.is_dir() and (there == path.absolute() or os.access(there, os.W_OK | os.X_OK)):
            return
        reason = "cannot be written to" if there.is_dir() else "is a file"
        raise ConfigurationError(f"cache.path {str(path)!r} must be a folder: {str(there)!r} {reason}", param="path")

    def _read_password(self) -> str | None:
        if self.password_file is None:
            return None
        try:
            return self.password_file.expanduser().read_text().strip()
        except OSError as error:
            raise ConfigurationError(
                f"cannot read cache.password_file {str(self.password_file)!r}: {error.strerror}"
            ) from None

    @field_validator("refuse_patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns
