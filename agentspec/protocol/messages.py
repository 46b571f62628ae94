"""Parses the messages and tools of a chat request into the form that chat templates read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from agentspec.protocol.validation import (
    REQUIRED,
    TEXT,
    Closed,
    Model,
    Text,
    one_of,
    read_one,
    read_parts,
    validated,
)

THOUGHTS = ("reasoning_content", "reasoning")
"""The names of the model's thoughts in a message of a chat."""


class TextPart(Model):
    """A text. Models do not read its annotations, log-probabilities and marks of caches."""

    text: Text = REQUIRED


class RefusalPart(Model):
    """What the model refused to answer with, earlier in the conversation."""

    refusal: Text = REQUIRED

    @property
    def text(self) -> str:
        return self.refusal


_PARTS: dict[str, type[TextPart | RefusalPart]] = {"text": TextPart}


def text_of(value: Any, name: str, kinds: Mapping[str, type[TextPart | RefusalPart]] = _PARTS) -> str:
    """The text of the field `name`: a string, or an array of parts, joined without separator."""
    if isinstance(value, str):
        return validated(TEXT, value, name)
    return "".join(part.text for part in read_parts(value, name, kinds))


class _Message(Closed):
    inert: ClassVar[frozenset[str]] = frozenset({"role"})
    parts: ClassVar[Mapping[str, type[TextPart | RefusalPart]]] = _PARTS
    name: Any = None  # labels a speaker for hosted models; no chat template that the local engine runs reads it
    content: Any = None

    def template_fields(self) -> dict[str, Any]:
        """The message's fields besides role and content."""
        return {}


class _Function(Model):
    name: Text = REQUIRED
    arguments: Text = REQUIRED


class _ToolCall(Model):
    function: _Function = REQUIRED
    id: Text = REQUIRED


class _AssistantMessage(_Message):
    """An earlier answer of the model, with its tool calls and its reasoning, which has two names."""

    parts: ClassVar[Mapping[str, type[TextPart | RefusalPart]]] = {**_PARTS, "refusal": RefusalPart}
    refusal: Text = ""
    tool_calls: Annotated[list[_ToolCall], Field(fail_fast=True)] | None = None
    reasoning_content: Text = ""
    reasoning: Text = ""

    def template_fields(self) -> dict[str, Any]:
        calls = [{"id": call.id, "type": "function", "function": dict(call.function)} for call in self.tool_calls or ()]
        thoughts = self.reasoning_content or self.reasoning
        return ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thoughts} if thoughts else {})


class _ToolMessage(_Message):
    """The result of a tool call."""

    tool_call_id: Text = REQUIRED
    name: Text | None = None

    def template_fields(self) -> dict[str, Any]:
        return {"tool_call_id": self.tool_call_id} | ({} if self.name is None else {"name": self.name})


_ROLES = dict.fromkeys(("system", "developer", "user"), _Message) | {
    "assistant": _AssistantMessage,
    "tool": _ToolMessage,
}


def parse_message(value: Any, name: str) -> dict[str, Any]:
    """One message as a chat template reads it. Raises `InvalidRequestError` that names the wrong part of `name`."""
    message = read_one(value, name, _ROLES, "role")
    more = message.template_fields()
    refusal = getattr(message, "refusal", "")
    content = "" if message.content is None and (refusal or "tool_calls" in more) else message.content
    role = "system" if value["role"] == "developer" else value["role"]
    return {"role": role, **more, "content": text_of(content, f"{name}.content", message.parts) + refusal}


class _Prediction(Closed):
    type: Annotated[Any, one_of("content")] = REQUIRED
    content: Any = None


def parse_prediction(value: Any) -> str:
    """The text of a prediction `{"type": "content", "content": text or parts}`."""
    return text_of(_Prediction.parse(value, "prediction").content, "prediction.content")


def without_past_thoughts(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat, with thoughts only after the last message of the user: endpoints require those of a tool
    loop that goes on, and refuse or ignore others.
    """
    found = [dict(message) for message in messages]
    last = max((at for at, message in enumerate(found) if message["role"] == "user"), default=-1)
    for message in found[: last + 1]:
        for name in THOUGHTS:
            message.pop(name, None)
    return found
