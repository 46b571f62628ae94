"""The tools of a Responses request, which are flat, as the nested ones of a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.validation import kind_of, shown_name, wrong_type

_CHOICES = ("none", "auto", "required")
_DESCRIBED = ("name", "description", "parameters", "strict")


def chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """`tools` as a chat request has them. Raises `InvalidRequestError` for a tool that is no function."""
    return [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _chat_tool(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong_type(name, "an object", tool)
    kind = tool.get("type")
    if kind != "function":
        shown = repr(shown_name(kind)) if isinstance(kind, str) else kind_of(kind)
        message = f"{name}.type is {shown}: only function tools are supported here, which the client runs itself"
        raise InvalidRequestError(message, param=f"{name}.type")
    for key, value in tool.items():
        if key not in (*_DESCRIBED, "type") and value not in (None, False, []):
            shown = f"{name}.{shown_name(key)}"
            raise InvalidRequestError(f"{shown} is not supported here", param=shown)
    return {"type": "function", "function": {key: tool[key] for key in _DESCRIBED if tool.get(key) is not None}}


def chat_choice(choice: Any, tools: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """The tool choice of a chat request, and the tools that it allows. Raises `InvalidRequestError`."""
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise _wrong_choice("tool_choice must be none, auto, required or an object that names a function")
        return choice, tools
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return {"type": "function", "function": {"name": _named(choice.get("name"), tools)}}, tools
    if kind == "allowed_tools":
        return _allowed(choice, tools)
    raise _wrong_choice("tool_choice must name a function, or allowed_tools that are functions")


def _allowed(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    mode, listed = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise _wrong_choice("tool_choice.mode must be auto or required, and tool_choice.tools an array")
    functions = [one for one in listed if isinstance(one, dict) and one.get("type") == "function"]
    if len(functions) < len(listed):
        raise _wrong_choice("tool_choice.tools may hold functions only")
    names = [_named(one.get("name"), tools) for one in functions]
    return mode, [tool for tool in tools if tool["function"].get("name") in names]


def _named(name: Any, tools: list[dict[str, Any]]) -> str:
    if not any(name == tool["function"].get("name") for tool in tools):
        raise _wrong_choice("tool_choice asks for a tool that tools does not have")
    return str(name)


def _wrong_choice(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tool_choice")
