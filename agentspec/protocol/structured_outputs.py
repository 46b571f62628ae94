"""Reads the form that a request wants of its answer: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter

from agentspec.errors import InvalidRequestError
from agentspec.protocol.validation import Refused, Text, check_json, kind_of, shown_name, validated
from agentspec.protocol.wire import loads
from agentspec.types import StructuredOutputs

MAX_CHOICES = 4096


def _schema(value: Any) -> Any:
    if isinstance(value, str):  # vLLM also accepts a schema as a JSON string
        try:
            value = loads(value)
        except ValueError:
            raise Refused(" is a string that is not JSON") from None
    if not isinstance(value, (bool, dict)):
        raise Refused(f" must be an object, not {kind_of(value)}")
    return value


_OBJECT: TypeAdapter[Mapping[str, Any]] = TypeAdapter(dict[str, Any])
_KINDS: dict[str, TypeAdapter[Any]] = {
    "json": TypeAdapter(Annotated[Any, AfterValidator(_schema)]),
    "json_object": TypeAdapter(bool),
    "regex": TypeAdapter(Text),
    "choice": TypeAdapter(Annotated[list[Text], Field(max_length=MAX_CHOICES, fail_fast=True), AfterValidator(tuple)]),
    "grammar": TypeAdapter(Text),
}


def parse_form(fields: Mapping[str, Any]) -> StructuredOutputs | None:
    """The form that one of `fields` requires; None if it allows any text. Raises `InvalidRequestError` with `param`."""
    given = {name: form for name, value in fields.items() if (form := _form(name, value)) is not None}
    if len(given) > 1:
        raise InvalidRequestError(f"send one of {', '.join(given)}, not all", param=next(iter(given)))
    return next(iter(given.values()), None)


def _form(name: str, value: Any) -> StructuredOutputs | None:
    if name == "response_format":
        return _response_format(name, validated(_OBJECT, value, name))
    if name != "structured_outputs":
        return _of_kind(name.removeprefix("guided_"), name, value)
    given = {kind: one for kind, one in validated(_OBJECT, value, name).items() if one is not None}
    if len(given) != 1:
        raise InvalidRequestError(f"{name} must hold exactly one kind of form, not {len(given)}", param=name)
    [(kind, one)] = given.items()
    return _of_kind(kind, shown_name(f"{name}.{kind}"), one)


def _response_format(name: str, wanted: Mapping[str, Any]) -> StructuredOutputs | None:
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True, param=f"{name}.type")
    if kind != "json_schema":
        raise InvalidRequestError(f"{name}.type must be text, json_object or json_schema", param=f"{name}.type")
    described = validated(_OBJECT, wanted.get("json_schema"), f"{name}.json_schema")
    return _of_kind("json", f"{name}.json_schema.schema", described.get("schema"))


def _of_kind(kind: str, name: str, value: Any) -> StructuredOutputs:
    if kind not in _KINDS:
        raise InvalidRequestError(f"{name} is not supported by this model", param=name)
    form = validated(_KINDS[kind], value, name)
    check_json(form, name)
    return StructuredOutputs(**{kind: form}, param=name)
