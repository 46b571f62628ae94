"""Settings taken apart: every single value by its key, fit to be shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, SecretStr

from agentspec.cache.settings import without_password


def flatten(value: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every single value below a table of settings, with its key."""
    children: Any = None
    if isinstance(value, BaseModel):
        children = ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, Mapping):
        children = value.items()
    if children is None:
        yield key, value
        return
    for name, child in children:
        yield from flatten(child, (*key, name))


def redact(value: Any) -> Any:
    """The value as JSON data, without secrets and passwords."""
    if isinstance(value, SecretStr):
        return str(value)
    if isinstance(value, tuple):
        return [redact(item) for item in value]
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if value is None or isinstance(value, (bool, float)):
        return value
    return int(value) if isinstance(value, int) else without_password(str(value))
