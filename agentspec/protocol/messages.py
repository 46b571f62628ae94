"""Parses the messages and tools of a chat request into the form that chat templates read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from agentspec.errors import InvalidRequestError
from agentspec.protocol.tool_names import CHOICES
from agentspec.protocol.validation import (
    REQUIRED,
    TEXT,
    Closed,
    Model,
    Refused,
    Text,
    check_json,
    must,
    one_of,
    read_one,
    read_parts,
    validated,
)

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


class TextPart(Model):
    """A text. Models do not read its annotations, log-probabilities and marks of caches."""

    text: Text = REQUIRED


_PARTS = {"text": TextPart}


def text_of(value: Any, name: str, kinds: Mapping[str, type[TextPart]] = _PARTS) -> str:
    """The text of the field `name`: a string, or an array of parts, joined without separator."""
    if isinstance(value, str):
        return validated(TEXT, value, name)
    return "".join(part.text for part in read_parts(value, name, kinds))


class _Message(Closed):
    inert: ClassVar[frozenset[str]] = frozenset({"role"})
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
    content = "" if message.content is None and "tool_calls" in more else message.content
    role = "system" if value["role"] == "developer" else value["role"]
    return {"role": role, **more, "content": text_of(content, f"{name}.content")}


class _Named(Model):
    name: Text = REQUIRED


class _NamedTool(Model):
    function: _Named = REQUIRED


def _may_be_called(name: str) -> bool:
    return _TOOL_NAME.fullmatch(name) is not None and name not in CHOICES


class _Described(Model):
    name: Annotated[Text, must(_may_be_called, " must be 1 to 128 letters, digits, '_', '-' or '.'")] = REQUIRED
    parameters: dict[str, Any] | None = None


class _Tool(Model):
    type: Annotated[Any, one_of("function")] = "function"
    function: _Described = REQUIRED


def parse_tools(tools: list[Any]) -> tuple[dict[str, Any], ...]:
    """`tools` as the client described them, without null fields."""
    check_json(tools, "tools")
    names = [_Tool.parse(tool, f"tools[{index}]").function.name for index, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise InvalidRequestError("two tools have the same name", param="tools")
    described = ({name: one for name, one in tool["function"].items() if one is not None} for tool in tools)
    return tuple({"type": "function", "function": function} for function in described)


def parse_tool_choice(value: Any) -> str:
    """The tool choice: "none", "auto", "required" or the name of a tool."""
    if not isinstance(value, str):
        return _NamedTool.parse(value, "tool_choice").function.name
    if value not in CHOICES:
        message = "tool_choice must be none, auto, required or an object that names a tool"
        raise InvalidRequestError(message, param="tool_choice")
    return value


class _Prediction(Closed):
    type: Annotated[Any, one_of("content")] = REQUIRED
    content: Any = None


def parse_prediction(value: Any) -> str:
    """The text of a prediction `{"type": "content", "content": text or parts}`."""
    return text_of(_Prediction.parse(value, "prediction").content, "prediction.content")


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
