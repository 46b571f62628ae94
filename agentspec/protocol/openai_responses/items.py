"""Reads the items of a Responses request into their normal form: the form in which they are stored and listed."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeGuard

from pydantic import AfterValidator, Field

from agentspec.errors import InvalidRequestError
from agentspec.protocol.messages import TextPart
from agentspec.protocol.requests import MAX_MESSAGES
from agentspec.protocol.validation import (
    REQUIRED,
    TEXT,
    Closed,
    Model,
    NonEmpty,
    Text,
    check_json,
    checked_length,
    one_of,
    read_one,
    read_parts,
    validated,
)

MAX_ID = 1024  # of a response; other gateways put routes into theirs
Item = dict[str, Any]
ADDITIONAL_TOOLS = "additional_tools"
CALLS = ("function_call", "custom_tool_call")
CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_STORED_ID = re.compile(rf"(?!\.{{1,2}}\Z)[!-~]{{1,{MAX_ID}}}")  # "." and ".." in a path are no names
# The last is Codex' own note of the turn that an item belongs to.
_INERT = frozenset({"id", "status", "type", "internal_chat_message_metadata_passthrough"})


def is_id(value: object) -> TypeGuard[str]:
    """Whether `value` can be the id of a stored response: not long, and of characters that every URL takes."""
    return isinstance(value, str) and _STORED_ID.fullmatch(value) is not None


def new_id(prefix: str) -> str:
    """An id that cannot be guessed: the item's or response's prefix and 128 random bits."""
    return f"{prefix}_{uuid.uuid4().hex}"


class _Text(TextPart):
    def part(self) -> Item:
        return {"type": "input_text", "text": self.text}


class _Refusal(Model):
    refusal: Text = REQUIRED

    def part(self) -> Item:
        return {"type": "refusal", "refusal": self.refusal}


class _Image(Closed):
    """An image, which only an upstream can look at."""

    inert: ClassVar[frozenset[str]] = _INERT
    image_url: NonEmpty = REQUIRED
    detail: Any = "auto"

    def part(self) -> Item:
        return {"type": "input_image", **self.model_dump()}


_Part = _Text | _Refusal | _Image
_TEXTS: dict[str, type[_Part]] = {"input_text": _Text, "output_text": _Text, "refusal": _Refusal}
_SAID = {**_TEXTS, "input_image": _Image}


def _parts(content: Any, name: str, kinds: Mapping[str, type[_Part]]) -> list[Item]:
    """The parts of a message or of a call's result; a string is one."""
    return [part.part() for part in read_parts(content, name, kinds)]


class _InputItem(Closed):
    """What an item of one kind may say. Its normal form begins with its id and kind."""

    inert: ClassVar[frozenset[str]] = _INERT
    prefix: ClassVar[str]  # of its id
    id: NonEmpty | None = None  # of any length: other servers put signatures in theirs

    def normal(self, name: str) -> Item:
        """The rest of the normal form. Raises `InvalidRequestError`, as `parse_input` does."""
        return self.model_dump(exclude={"id"}, exclude_none=True)


class _MessageItem(_InputItem):
    prefix = "msg"
    role: Annotated[Any, one_of("user", "system", "developer", "assistant")] = REQUIRED
    content: Any = None
    phase: Any = None

    def normal(self, name: str) -> Item:
        own = self.role == "assistant"
        parts = _parts(self.content, f"{name}.content", _TEXTS if own else _SAID)
        return {"role": self.role, "content": [_written(one) for one in parts] if own else parts}


def _written(part: Item) -> Item:
    """A part of an earlier answer, as answers have it."""
    return part if part["type"] == "refusal" else {"type": "output_text", "text": part["text"], "annotations": []}


class _Call(_InputItem):
    call_id: NonEmpty = REQUIRED
    name: Text = REQUIRED
    namespace: Annotated[Text | None, AfterValidator(lambda name: name or None)] = None


class _FunctionCall(_Call):
    prefix = "fc"
    arguments: Text = REQUIRED


class _CustomCall(_Call):
    prefix = "ctc"
    input: Text = REQUIRED


class _CallOutput(_InputItem):
    prefix = "fco"
    call_id: NonEmpty = REQUIRED
    output: Any = REQUIRED
    name: Any = None
    namespace: Any = None

    def normal(self, name: str) -> Item:
        name, text = f"{name}.output", isinstance(self.output, str)
        output = validated(TEXT, self.output, name) if text else _parts(self.output, name, _TEXTS)
        return {"call_id": self.call_id, "output": output}


class _AdditionalTools(_InputItem):
    prefix = "at"
    role: Annotated[Text, one_of("developer")] = REQUIRED
    tools: list[Any] = REQUIRED

    def normal(self, name: str) -> Item:
        check_json(self.tools, f"{name}.tools")
        return {"role": self.role, "tools": self.tools}


class _ReasoningItem(_InputItem):
    prefix = "rs"
    summary: Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    content: Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    encrypted_content: Any = None

    def normal(self, name: str) -> Item:
        if self.encrypted_content and not (self.content or self.summary):
            message = f"{name}.encrypted_content is not of this server, which cannot read it; leave the item out"
            raise InvalidRequestError(message, param=f"{name}.encrypted_content")
        return {
            "summary": [{"type": "summary_text", "text": one.text} for one in self.summary or ()],
            "content": [{"type": "reasoning_text", "text": one.text} for one in self.content or ()],
        }


_KINDS: dict[str, type[_InputItem]] = {
    "message": _MessageItem,
    "function_call": _FunctionCall,
    "custom_tool_call": _CustomCall,
    "function_call_output": _CallOutput,
    "custom_tool_call_output": _CallOutput,
    ADDITIONAL_TOOLS: _AdditionalTools,
    "reasoning": _ReasoningItem,
}


def parse_input(value: Any) -> list[Item]:
    """The items of a request's `input`, a string or an array.

    Raises `InvalidRequestError` with `param` for an item that is wrong or of an unknown kind, and for too many.
    """
    given = [{"role": "user", "content": value}] if isinstance(value, str) else value
    items = checked_length(given, "input", MAX_MESSAGES)
    return [_item(item, f"input[{index}]") for index, item in enumerate(items)]


def _item(value: Any, name: str) -> Item:
    if isinstance(value, dict) and not value.get("type") and "role" in value:
        value = {**value, "type": "message"}
    item = read_one(value, name, _KINDS)
    status = {} if isinstance(item, _AdditionalTools) else {"status": "completed"}  # OpenAI's type has none
    return {"id": item.id or new_id(item.prefix), "type": value["type"], **status, **item.normal(name)}
