"""Reads the items of a Responses request into their normal form: the form in which they are stored and listed."""

from __future__ import annotations

import re
import uuid
from typing import Annotated, Any, ClassVar, TypeGuard

from pydantic import AfterValidator, Field, TypeAdapter

from agentspec.errors import InvalidRequestError
from agentspec.protocol.requests import MAX_MESSAGES
from agentspec.protocol.validation import (
    REQUIRED,
    Closed,
    Model,
    NonEmpty,
    Text,
    check_json,
    kind_of,
    must,
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
_TEXT: TypeAdapter[str] = TypeAdapter(Text)
_STORED_ID = re.compile(rf"(?!\.{{1,2}}\Z)[!-~]{{1,{MAX_ID}}}")  # "." and ".." in a path are no names
# The last is Codex' own note of the turn that an item belongs to.
_INERT = frozenset({"id", "status", "type", "internal_chat_message_metadata_passthrough"})


def is_id(value: object) -> TypeGuard[str]:
    """Whether `value` can be the id of a stored response: not long, and of characters that every URL takes."""
    return isinstance(value, str) and _STORED_ID.fullmatch(value) is not None


def new_id(prefix: str) -> str:
    """An id that nobody can guess: the item's or response's prefix and 128 random bits."""
    return f"{prefix}_{uuid.uuid4().hex}"


class _TextPart(Model):
    """A piece of a message or a thought. Annotations and log-probabilities tell a model nothing."""

    text: Text = REQUIRED


class _Refusal(Model):
    refusal: Text = REQUIRED


class _Image(Closed):
    """An image, which only an upstream can look at."""

    inert: ClassVar[frozenset[str]] = _INERT
    image_url: NonEmpty = REQUIRED
    detail: Any = "auto"


class _InputItem(Closed):
    """What an item of one kind may say. Its normal form begins with its id and kind."""

    inert: ClassVar[frozenset[str]] = _INERT
    id: NonEmpty | None = None  # of any length: other servers put signatures in theirs

    def normal(self, name: str, media: bool) -> Item:
        """The rest of the normal form. Raises `InvalidRequestError`, as `parse_input` does."""
        return self.model_dump(exclude={"id"}, exclude_none=True)


class _MessageItem(_InputItem):
    role: Annotated[Any, must(lambda one: one in ROLES, f" must be one of {', '.join(ROLES)}")] = REQUIRED
    content: Any = None
    phase: Any = None

    def normal(self, name: str, media: bool) -> Item:
        if self.role != "assistant":
            return {"role": self.role, "content": _parts(self.content, f"{name}.content", media)}
        return {"role": self.role, "content": [_written(one) for one in _parts(self.content, f"{name}.content", False)]}


class _Call(_InputItem):
    call_id: NonEmpty = REQUIRED
    name: Text = REQUIRED
    namespace: Annotated[Text | None, AfterValidator(lambda name: name or None)] = None


class _FunctionCall(_Call):
    arguments: Text = REQUIRED


class _CustomCall(_Call):
    input: Text = REQUIRED


class _CallOutput(_InputItem):
    call_id: NonEmpty = REQUIRED
    output: Any = REQUIRED
    name: Any = None
    namespace: Any = None

    def normal(self, name: str, media: bool) -> Item:
        text = isinstance(self.output, str)
        output = (
            validated(_TEXT, self.output, f"{name}.output") if text else _parts(self.output, f"{name}.output", False)
        )
        return {"call_id": self.call_id, "output": output}


class _AdditionalTools(_InputItem):
    role: Annotated[Text, must(lambda one: one == "developer", " must be developer")] = REQUIRED
    tools: list[Any] = REQUIRED

    def normal(self, name: str, media: bool) -> Item:
        check_json(self.tools, f"{name}.tools")
        return {"role": self.role, "tools": self.tools}


class _ReasoningItem(_InputItem):
    summary: Annotated[list[_TextPart], Field(fail_fast=True)] | None = None
    content: Annotated[list[_TextPart], Field(fail_fast=True)] | None = None
    encrypted_content: Any = None

    def normal(self, name: str, media: bool) -> Item:
        if self.encrypted_content and not (self.content or self.summary):
            message = f"{name}.encrypted_content is not of this server, which cannot read it; leave the item out"
            raise InvalidRequestError(message, param=f"{name}.encrypted_content")
        return {
            "summary": [{"type": "summary_text", "text": one.text} for one in self.summary or ()],
            "content": [{"type": "reasoning_text", "text": one.text} for one in self.content or ()],
        }


_KINDS: dict[str, tuple[type[_InputItem], str]] = {  # with the beginning of their ids
    "message": (_MessageItem, "msg"),
    "function_call": (_FunctionCall, "fc"),
    "custom_tool_call": (_CustomCall, "ctc"),
    "function_call_output": (_CallOutput, "fco"),
    "custom_tool_call_output": (_CallOutput, "ctco"),
    ADDITIONAL_TOOLS: (_AdditionalTools, "at"),
    "reasoning": (_ReasoningItem, "rs"),
}


def parse_input(value: Any, *, media: bool) -> list[Item]:
    """The items of a request's `input`, a string or an array. `media`: whether images may be among them.

    Raises `InvalidRequestError` with `param` for an item that is wrong or of an unknown kind, and for too many.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        expected = "a string or an array of items"
        raise wrong_type("input", expected, value)
    if len(value) > MAX_MESSAGES:
        raise InvalidRequestError(f"input has {len(value)} entries; {MAX_MESSAGES} are allowed", param="input")
    return [_item(item, f"input[{index}]", media) for index, item in enumerate(value)]


def _item(value: Any, name: str, media: bool) -> Item:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    kind = value.get("type") or ("message" if "role" in value else None)
    if not isinstance(kind, str) or kind not in _KINDS:
        known = f"is not supported here; known: {', '.join(_KINDS)}"
        raise InvalidRequestError(f"{name}.type {_shown(kind)} {known}", param=f"{name}.type")
    model, prefix = _KINDS[kind]
    item = model.parse(value, name)
    status = {} if kind == ADDITIONAL_TOOLS else {"status": "completed"}  # OpenAI's type has none
    return {"id": item.id or new_id(prefix), "type": kind, **status, **item.normal(name, media)}


def _shown(kind: Any) -> str:
    return repr(shown_name(kind) if isinstance(kind, str) else kind_of(kind))


def _parts(content: Any, name: str, media: bool) -> list[Item]:
    """The parts of a message or of a call's result; a string is one."""
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise wrong_type(name, "a string or an array of parts", parts)
    return [_part(part, f"{name}[{at}]", media) for at, part in enumerate(parts)]


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
    if media and kind == "input_image":
        return {"type": kind, **_Image.parse(value, name).model_dump()}
    known = "text (input_text, output_text)" + (" and input_image" if media else "")
    raise InvalidRequestError(f"{name}.type {_shown(kind)}: this model reads {known} only", param=f"{name}.type")
