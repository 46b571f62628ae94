"""Lists every effective setting with its source, with secrets masked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr

from agentspec.cache.settings import without_password
from agentspec.settings.load import Settings, SourceKind


@dataclass(frozen=True, slots=True)
class EffectiveValue:
    """One effective setting: its dotted key, its value as JSON data with secrets masked, and its source.

    `origin` is the name of the variable or file, empty for flags and defaults.
    """

    key: str
    value: Any
    source: SourceKind
    origin: str


def effective_values(settings: Settings) -> list[EffectiveValue]:
    """Every value of `settings` in the order of the tables; unset values are listed as None."""
    return [
        EffectiveValue(".".join(key), _redact(value), *settings.origin(key)) for key, value in _flatten(settings, ())
    ]


def _flatten(value: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every single value below a table of settings, with its key."""
    children: Any = None
    if isinstance(value, BaseModel):
        children = ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, Mapping):
        children = value.items()
    if children is None:
        yield key, value
        return
    for name, child in children:
        yield from _flatten(child, (*key, name))


def _redact(value: Any) -> Any:
    """The value as JSON data, without secrets and passwords."""
    if isinstance(value, SecretStr):
        return str(value)
    if isinstance(value, tuple):
        return [_redact(item) for item in value]
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if value is None or isinstance(value, (bool, float)):
        return value
    return int(value) if isinstance(value, int) else without_password(str(value))
