"""What a request may hold as JSON of any kind: the form that its answer must have, and arguments of a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, TypeAdapter

from agentspec.errors import InvalidRequestError
from agentspec.protocol.validation import (
    OBJECT,
    Closed,
    Refused,
    Text,
    check_json,
    kind_of,
    one_of,
    shown_name,
    validated,
)
from agentspec.protocol.wire import loads
from agentspec.types import StructuredOutputs

MAX_ALLOWED_ANSWERS = 4096  # of `choice`
FORM_FIELDS = "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar".split()


def _schema(value: Any) -> Any:
    if isinstance(value, str):  # vLLM also accepts a schema as a JSON string
        try:
            value = loads(value)
        except ValueError:
            raise Refused(" is a string that is not JSON") from None
    if not isinstance(value, (bool, dict)):
        raise Refused(f" must be an object, not {kind_of(value)}")
    return value


_Answers = Annotated[list[Text], Field(max_length=MAX_ALLOWED_ANSWERS, fail_fast=True), AfterValidator(tuple)]
_KINDS: dict[str, TypeAdapter[Any]] = {
    "json": TypeAdapter(Annotated[Any, AfterValidator(_schema)]),
    "json_object": TypeAdapter(bool),
    "regex": TypeAdapter(Text),
    "choice": TypeAdapter(_Answers),
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
        return _response_format(name, validated(OBJECT, value, name))
    if name != "structured_outputs":
        return _of_kind(name.removeprefix("guided_"), name, value)
    given = {kind: one for kind, one in validated(OBJECT, value, name).items() if one is not None}
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
    described = validated(OBJECT, wanted.get("json_schema"), f"{name}.json_schema")
    return _of_kind("json", f"{name}.json_schema.schema", described.get("schema"))


def _of_kind(kind: str, name: str, value: Any) -> StructuredOutputs:
    if kind not in _KINDS:
        raise InvalidRequestError(f"{name} is not supported by this model", param=name)
    form = validated(_KINDS[kind], value, name)
    check_json(form, name)
    return StructuredOutputs(**{kind: form}, param=name)


class _Format(Closed):
    inert: ClassVar[frozenset[str]] = frozenset({"schema"})
    type: Annotated[Text, one_of("text", "json_object", "json_schema")] = "text"
    name: Text | None = None
    description: Text | None = None
    strict: bool | None = None


def parse_format(value: Any, name: str) -> dict[str, Any]:
    """The fields of a chat for the form that the field `name` of a Responses or a Messages request asks for."""
    wanted = _Format.parse(value, name)
    if wanted.type != "json_schema":
        return {} if wanted.type == "text" else {"response_format": {"type": wanted.type}}
    schema = validated(OBJECT, value.get("schema"), f"{name}.schema")
    described = {"name": wanted.name or "answer", "schema": schema, **wanted.given("description", "strict")}
    return {"response_format": {"type": wanted.type, "json_schema": described}}


# Arguments that agentspec or Jinja set when the chat template is applied.
_FIXED = frozenset(
    "conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize"
    " sanitize_control_tokens padding truncation max_length return_tensors return_dict return_assistant_tokens_mask"
    " tokenizer_kwargs cycler dict joiner lipsum loop namespace raise_exception range self strftime_now".split()
)


def _may_be_set(arguments: dict[str, Any]) -> dict[str, Any]:
    for key in arguments:
        if key in _FIXED or not key.isidentifier():
            raise Refused(f" may not set {key[:80]!r}")
    check_json(arguments, "chat_template_kwargs")
    return arguments


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_may_be_set)]
