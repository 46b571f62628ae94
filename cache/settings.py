"""Settings of the token cache, composed into the application's settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, field_validator

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_span(value: object) -> object:
    """`"30d"` in seconds, units s, m, h, d and w; other values as they are. Raises `ValueError` for other text."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*([smhdw]?)\s*", value)
    if match is None:
        raise ValueError(f"{value!r} is no time span; write a number and s, m, h, d or w, such as 30d")
    return float(match[1]) * _UNITS[match[2] or "s"]


Seconds = Annotated[float, BeforeValidator(parse_span)]


class CacheSettings(BaseModel):
    """`[cache]` in agentspec.toml. Without a path the cache lives in memory only and is gone at exit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path | None = Field(default=None, description="Folder for the sequence database; unset keeps all in memory")
    memory_bytes: ByteSize = Field(default=ByteSize(512 << 20), gt=0, description="Most memory the index may use")
    store: bool = Field(
        default=True,
        description="Keep prompts, outputs and their key/value rows; false keeps nothing once a request ends",
    )
    retention: Seconds | None = Field(
        default=None, ge=0, description='Forget what is older: seconds, or text such as `"30d"`; unset keeps all'
    )
    refuse_patterns: tuple[str, ...] = Field(
        default=(), description="Regular expressions; an output whose text matches one is neither stored nor shared"
    )

    @field_validator("path")
    @classmethod
    def _home(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser()

    @field_validator("refuse_patterns")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns
