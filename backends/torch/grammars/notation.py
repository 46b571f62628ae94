"""Writes texts, regular expressions and JSON schemas as grammars want them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import llguidance

from agentspec.errors import InvalidRequestError

BLANKS: Final = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})"}  # unlimited blanks would let a weak model ramble
COMBINATORS = ("allOf", "unevaluatedProperties", "dependentSchemas", "then", "not")
_NAMED_SCHEMAS = ("properties", "$defs", "definitions")
_VALUES = ("enum", "const", "default", "examples")
_LARK = re.compile(r"[ \t\r\f\v]*+(?:%llguidance\b|start[ \t]*+:)")


def lark_string(text: str) -> str:
    """`text` as a string literal in Lark's notation."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def lark_regex(regex: str) -> str:
    """A regular expression as Lark writes it, slashes included."""
    grammar = json.loads(llguidance.LLMatcher.grammar_from_regex(regex))
    lark: str = grammar["grammars"][0]["lark_grammar"]
    return lark.removeprefix("start: ")


def as_lark(grammar: str, param: str) -> str:
    """A grammar in Lark's notation. Raises `InvalidRequestError` for one in GBNF."""
    if "::=" in grammar and not any(map(_LARK.match, grammar.split("\n"))):
        message = "the grammar is in GBNF: write it in Lark's notation, with a rule `start: ...`"
        raise InvalidRequestError(message, param=param)
    return grammar


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` as the grammar uses it: limits blanks, and forbids unlisted properties unless it has a rule for them.

    A model that may add properties rarely stops. A schema that combines several descriptions of one object, by keywords
    (`COMBINATORS`) or next to alternatives or references, keeps its rules for properties.
    """
    written = json.dumps(schema)
    combined = any(f'"{word}":' in written for word in COMBINATORS) or _combines(schema)
    return {**(schema if combined else _closed(schema)), "x-guidance": BLANKS}


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = {key: _inner(key, value) for key, value in schema.items()}
    lists = isinstance(schema.get("properties"), Mapping) and schema.get("type", "object") == "object"
    lists = lists and set(map(str, _list(schema.get("required")))) <= schema["properties"].keys()
    stated = {"additionalProperties", "patternProperties"} & schema.keys()
    return {**inner, "additionalProperties": False} if lists and not stated else inner


def _combines(schema: Any) -> bool:
    """Whether some object lists what it holds, and alternatives or a reference list what else it holds."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, Mapping):
        return False
    others = [other for key in ("anyOf", "oneOf") for other in _list(schema.get(key)) if isinstance(other, Mapping)]
    other = "$ref" in schema or any({"properties", "$ref"} & one.keys() for one in others)
    return bool({"properties", "required"} & schema.keys() and other) or any(map(_combines, schema.values()))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _inner(key: str, value: Any) -> Any:
    if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: _closed(one) for name, one in value.items()}
    return value if key in _VALUES else _closed(value)
