"""JSON schemas as the grammar takes them: closed, and with few blanks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

BLANKS: Final = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})"}  # any amount would let a weak model ramble
_PUT_TOGETHER = ("allOf", "unevaluatedProperties", "dependentSchemas", "then", "not")
_NAMED = ("properties", "$defs", "definitions")
_PLAIN = ("enum", "const", "default", "examples")


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema`, in which objects that list their properties have no others unless it speaks of others.

    A model that may add what it likes rarely comes to an end. Schemas that are put together of parts, each of which
    describes the same object, stay as they are.
    """
    written = json.dumps(schema)
    apart = any(f'"{word}":' in written for word in _PUT_TOGETHER)
    return {**(schema if apart else _closed(schema)), "x-guidance": BLANKS}


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = {key: _inner(key, value) for key, value in schema.items()}
    lists = isinstance(schema.get("properties"), Mapping) and schema.get("type", "object") == "object"
    spoken = {"additionalProperties", "patternProperties"} & schema.keys()
    return {**inner, "additionalProperties": False} if lists and not spoken else inner


def _inner(key: str, value: Any) -> Any:
    if key in _NAMED and isinstance(value, Mapping):
        return {name: _closed(one) for name, one in value.items()}
    return value if key in _PLAIN else _closed(value)
