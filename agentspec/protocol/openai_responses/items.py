"""Reads the items of a Responses request into their normal form: the form in which they are stored and listed."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, TypeGuard

from pydantic import AfterValidator, Field, TypeAdapter

from agentspec.errors import InvalidRequestError
from agentspec.protocol.json_values import check_json
from agentspec.protocol.validation import (
    REQUIRED,
    Model,
    Text,
    kind_of,
    must,
    refuse_unknown,
    shown_name,
    validated,
    wrong_type,
)

MAX_ID = 1024  # of a response; other gateways put routes into theirs
Item = dict[str, Any]
ADDITIONAL_TOOLS = "additional_tools"
CALLS = ("function_call", "custom_tool_call")
CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
ROLES = ("user", "system", "developer", "assistant")
_Id = Annotated[Text, must(bool, " must not be empty")]  # of any length: other servers put signatures in theirs
_MEDIA = {"input_image": ("image_url", "file_id"), "input_file": ("file_data", "filename", "file_id", "file_url")}
_TEXT: TypeAdapter[str] = TypeAdapter(Text)
_STORED_ID = re.compile(rf"(?!\.{{1,2}}\Z)[!-~]{{1,{MAX_ID}}}")  # "." and ".." in a path are no names
# The last is Codex' own note of the turn that an item belongs to.
_INERT = {"id", "status", "type", "internal_chat_message_metadata_passthrough"}


def is_id(value: object) -> TypeGuard[str]:
    """Whether `value` can be the id of a stored response: not long, and of characters that every URL takes."""
    return isinstance(value, str) and _STORED_ID.fullmatch(value) is not None


def new_id(prefix: str) -> str:
    """An id that nobody can guess: the item's or response's prefix and 128 random bits."""
    return f"{prefix}_{uuid.uuid4().hex}"


class _TextPart(Model):
    """A piece of a message's text. Annotations and log-probabilities of an earlier answer tell a model nothing."""

    text: Text = REQUIRED


class _Refusal(Model):
    refusal: Text = REQUIRED


class _FunctionCallItem(Model):
    call_id: _Id = REQUIRED
    name: Text = REQUIRED
    arguments: Text = REQUIRED


class _CustomCallItem(Model):
    call_id: _Id = REQUIRED
    name: Text = REQUIRED
    input: Text = REQUIRED


class _CallOutputItem(Model):
    call_id: _Id = REQUIRED
    output: Any = REQUIRED


class _Grouped(Model):
    namespace: Text | None = None


class _AdditionalTools(Model):
    role: Annotated[Text, must(lambda one: one == "developer", " must be developer")] = REQUIRED
    tools: list[Any] = REQUIRED


class _Thought(Model):
    text: Text = REQUIRED


class _ReasoningItem(Model):
    summary: Annotated[list[_Thought], Field(fail_fast=True)] | None = None
    content: Annotated[list[_Thought], Field(fail_fast=True)] | None = None
    encrypted_content: Annotated[Any, AfterValidator(lambda value: value or None)] = None


class _Identified(Model):
    id: _Id | None = None


def parse_input(value: Any, *, most: int, media: bool) -> list[Item]:
    """The items of a request's `input`, a string or an array. `media`: whether images and files may be among them.

    Raises `InvalidRequestError` with `param` for an item that is wrong, of an unknown kind, or beyond `most` items.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        expected = "a string or an array of items"
        raise wrong_type("input", expected, value)
    if len(value) > most:
        raise InvalidRequestError(f"input has {len(value)} entries; {most} are allowed", param="input")
    return [_item(item, f"input[{index}]", media) for index, item in enumerate(value)]


def _item(value: Any, name: str, media: bool) -> Item:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    kind = value.get("type") or ("message" if "role" in value else None)
    if kind == "message":
        return _message(value, name, media)
    if kind == ADDITIONAL_TOOLS:
        return _additional_tools(value, name)
    if kind in CALLS:
        return _call(value, kind, name)
    if kind in CALL_OUTPUTS:
        return _call_output(value, kind, name)
    if kind == "reasoning":
        return _reasoning(value, name)
    known = ", ".join(("message", *CALLS, *CALL_OUTPUTS, ADDITIONAL_TOOLS, "reasoning"))
    shown = shown_name(kind) if isinstance(kind, str) else kind_of(kind)
    raise InvalidRequestError(f"{name}.type {shown!r} is not supported here; known: {known}", param=f"{name}.type")


def _message(value: Mapping[str, Any], name: str, media: bool) -> Item:
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise InvalidRequestError(f"{name}.role must be one of {', '.join(ROLES)}", param=f"{name}.role")
    refuse_unknown(value, {"role", "content", "phase"} | _INERT, name)
    written = role == "assistant"
    parts = [{"type": "output_text" if written else "input_text", "text": content}] if _is_text(content) else content
    if not isinstance(parts, list):
        raise wrong_type(f"{name}.content", "a string or an array of parts", parts)
    found = [_part(part, f"{name}.content[{at}]", media and not written) for at, part in enumerate(parts)]
    if written:
        found = [_written(part) for part in found]
    head = {"id": _id_of(value, name, "msg"), "type": "message", "role": role, "status": "completed"}
    return head | {"content": found}


def _is_text(content: Any) -> bool:
    return isinstance(content, str)


def _written(part: Item) -> Item:
    """A part of an earlier answer, as answers have it."""
    return part if part["type"] == "refusal" else {"type": "output_text", "text": part["text"], "annotations": []}


def _part(value: Any, name: str, media: bool) -> Item:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    kind = value.get("type")
    if kind in ("input_text", "output_text"):
        return {"type": "input_text", "text": _TextPart.parse(value, name).text}
    if kind == "refusal":
        return {"type": kind, "refusal": _Refusal.parse(value, name).refusal}
    if media and isinstance(kind, str) and kind in _MEDIA:
        return _medium(value, kind, name)
    known = "text (input_text, output_text)" + (f" and {', '.join(_MEDIA)}" if media else "")
    shown = shown_name(kind) if isinstance(kind, str) else kind_of(kind)
    raise InvalidRequestError(f"{name}.type {shown!r}: this model reads {known} only", param=f"{name}.type")


def _medium(value: Mapping[str, Any], kind: str, name: str) -> Item:
    """An image or a file, which only an upstream can look at."""
    refuse_unknown(value, {*_MEDIA[kind], "detail"} | _INERT, name)
    for key in _MEDIA[kind]:
        if not isinstance(value.get(key), str | None):
            raise wrong_type(f"{name}.{key}", "a string", value[key])
    source = _MEDIA[kind][0]
    if not value.get(source):
        raise InvalidRequestError(f"{name} needs {source}: this model keeps no files", param=f"{name}.{source}")
    given = {key: value[key] for key in (*_MEDIA[kind], "detail") if value.get(key) is not None}
    return {"type": kind, **({"detail": "auto"} if kind == "input_image" else {}), **given}


def _call(value: Mapping[str, Any], kind: str, name: str) -> Item:
    custom = kind == "custom_tool_call"
    call = (_CustomCallItem if custom else _FunctionCallItem).parse(value, name)
    fields = call.model_dump()
    refuse_unknown(value, {*fields, "namespace"} | _INERT, name)
    namespace = _Grouped.parse(value, name).namespace
    head = {"id": _id_of(value, name, "ctc" if custom else "fc"), "type": kind, "status": "completed"}
    return {**head, **fields, **({"namespace": namespace} if namespace else {})}


def _call_output(value: Mapping[str, Any], kind: str, name: str) -> Item:
    given = _CallOutputItem.parse(value, name)
    refuse_unknown(value, {"call_id", "output", "name", "namespace"} | _INERT, name)
    output = given.output
    if isinstance(output, list):
        output = [_part(part, f"{name}.output[{at}]", False) for at, part in enumerate(output)]
    elif _is_text(output):
        output = validated(_TEXT, output, f"{name}.output")
    else:
        raise wrong_type(f"{name}.output", "a string or an array of parts", output)
    prefix = "ctco" if kind == "custom_tool_call_output" else "fco"
    head = {"id": _id_of(value, name, prefix), "type": kind, "status": "completed"}
    return head | {"call_id": given.call_id, "output": output}


def _additional_tools(value: Mapping[str, Any], name: str) -> Item:
    given = _AdditionalTools.parse(value, name)
    refuse_unknown(value, {"role", "tools"} | _INERT, name)
    check_json(given.tools, f"{name}.tools")
    return {"id": _id_of(value, name, "at"), "type": ADDITIONAL_TOOLS, "role": given.role, "tools": given.tools}


def _reasoning(value: Mapping[str, Any], name: str) -> Item:
    thought = _ReasoningItem.parse(value, name)
    refuse_unknown(value, {"summary", "content", "encrypted_content"} | _INERT, name)
    if thought.encrypted_content is not None and not (thought.content or thought.summary):
        message = f"{name}.encrypted_content is not of this server, which cannot read it; leave the item out"
        raise InvalidRequestError(message, param=f"{name}.encrypted_content")
    return {
        "id": _id_of(value, name, "rs"),
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": one.text} for one in thought.summary or ()],
        "content": [{"type": "reasoning_text", "text": one.text} for one in thought.content or ()],
        "status": "completed",
    }


def _id_of(value: Mapping[str, Any], name: str, prefix: str) -> str:
    return _Identified.parse(value, name).id or new_id(prefix)
