"""Which of a Responses request's tools the model may call, or must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.openai_responses.tool_names import key_of
from agentspec.protocol.openai_responses.tools import ClientTool

_CHOICES = ("none", "auto", "required")
_KINDS = ("function", "custom")


def allowed_tools(choice: Any, tools: Sequence[ClientTool]) -> tuple[str | ClientTool, list[ClientTool]]:
    """The tool choice, of a single tool that one, and the tools that it allows. Raises `InvalidRequestError`."""
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise _wrong_choice("tool_choice must be none, auto, required or an object that names a tool")
        return choice, [*tools]
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in _KINDS:
        return _named(choice, tools), [*tools]
    if kind == "allowed_tools":
        return _allowed(choice, tools)
    raise _wrong_choice("tool_choice must name a function or a custom tool, or allowed_tools that are such")


def _allowed(choice: dict[str, Any], tools: Sequence[ClientTool]) -> tuple[str, list[ClientTool]]:
    mode, listed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise _wrong_choice("tool_choice.mode must be auto or required, and tool_choice.tools an array")
    if any(not isinstance(one, dict) or one.get("type") not in _KINDS for one in listed):
        raise _wrong_choice("tool_choice.tools may hold functions and custom tools only")
    keys = {_named(one, tools).key for one in listed}
    return mode, [tool for tool in tools if tool.key in keys]


def _named(choice: Mapping[str, Any], tools: Sequence[ClientTool]) -> ClientTool:
    """The tool that is meant. Without `namespace`, which OpenAI's type has no place for, the only one of its name."""
    kind, name, namespace = choice.get("type"), choice.get("name"), choice.get("namespace")
    alike = [tool for tool in tools if (tool.kind, tool.name) == (kind, name)]
    if namespace is None:
        own = [tool for tool in alike if not tool.key[0]]
        if len(alike) > 1 and not own:
            raise _wrong_choice("tool_choice names a tool of several namespaces; add the field namespace")
        alike = own or alike
    else:
        alike = [tool for tool in alike if tool.key == key_of(str(name), str(namespace))]
    if not alike:
        raise _wrong_choice("tool_choice asks for a tool that tools does not have")
    return alike[0]


def _wrong_choice(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tool_choice")
