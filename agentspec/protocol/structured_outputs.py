"""The form of an answer, by OpenAI's `response_format`, vLLM's `structured_outputs` or its older `guided_*` fields.

Parsed by hand, since what a field may hold depends on the value of another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.validation import NOT_TEXT, is_text, shown_name, wrong_type
from agentspec.types import StructuredOutputs

FORM_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"
)  # fmt: skip
MAX_CHOICES = 4096


def parse_form(fields: Mapping[str, Any]) -> StructuredOutputs | None:
    """The form that one of `fields` asks for; None for any text. Raises `InvalidRequestError` with `param`."""
    found = {name: _form(name, value) for name, value in fields.items()}
    given = {name: form for name, form in found.items() if form is not None}
    if len(given) > 1:
        raise InvalidRequestError(f"send one of {', '.join(given)}, not all", param=next(iter(given)))
    return next(iter(given.values()), None)


def _form(name: str, value: Any) -> StructuredOutputs | None:
    if name == "response_format":
        return _response_format(name, _object(name, value))
    if name != "structured_outputs":
        return _of_kind(name.removeprefix("guided_"), name, value)
    given = {kind: one for kind, one in _object(name, value).items() if one is not None}
    if len(given) != 1:
        raise InvalidRequestError(f"{name} must hold exactly one kind of form, not {len(given)}", param=name)
    [(kind, one)] = given.items()
    return _of_kind(kind, shown_name(f"{name}.{kind}"), one)


def _response_format(name: str, wanted: dict[str, Any]) -> StructuredOutputs | None:
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise InvalidRequestError(f"{name}.type must be text, json_object or json_schema", param=f"{name}.type")
    described = _object(f"{name}.json_schema", wanted.get("json_schema"))
    return _of_kind("json", f"{name}.json_schema.schema", described.get("schema"))


def _of_kind(kind: str, name: str, value: Any) -> StructuredOutputs:
    if kind == "json":
        return StructuredOutputs(json=_schema(name, value))
    if kind == "json_object":
        if not isinstance(value, bool):
            raise wrong_type(name, "a boolean", value)
        return StructuredOutputs(json_object=value)
    if kind == "choice":
        return StructuredOutputs(choice=_choices(name, value))
    if kind == "regex":
        return StructuredOutputs(regex=_string(name, value))
    if kind == "grammar":
        return StructuredOutputs(grammar=_string(name, value))
    raise InvalidRequestError(f"{name} is not supported by this model", param=name)


def _schema(name: str, value: Any) -> dict[str, Any] | bool:
    if isinstance(value, str):  # vLLM takes a schema written out as well
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequestError(f"{name} is a string that is not JSON", param=name) from None
    return value if isinstance(value, bool) else _object(name, value)


def _choices(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise wrong_type(name, "an array", value)
    if len(value) > MAX_CHOICES:
        raise InvalidRequestError(f"{name} has {len(value)} entries; {MAX_CHOICES} are allowed", param=name)
    return tuple(_string(name, choice) for choice in value)


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    if not is_text(value):
        raise InvalidRequestError(name + NOT_TEXT, param=name)
    return value
