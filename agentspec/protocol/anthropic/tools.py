"""The tools of a Messages request, and the choice among them, as those of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.json_values import check_json
from agentspec.protocol.tool_names import ToolNames, key_of
from agentspec.protocol.validation import refuse_unknown, shown_name, wrong_type

# `defer_loading` saves tokens of a prompt by a search that only Anthropic's servers do: here all tools are shown.
_INERT = {"cache_control", "defer_loading", "eager_input_streaming"}
_KNOWN = {"type", "name", "description", "input_schema", "input_examples", "strict", "allowed_callers"} | _INERT
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(value: Any, most: int) -> list[dict[str, Any]]:
    """`tools` as functions. Raises `InvalidRequestError` for a tool of Anthropic's servers, named by its type."""
    if not isinstance(value, list):
        raise wrong_type("tools", "an array", value)
    if len(value) > most:
        raise InvalidRequestError(f"tools has {len(value)} entries; {most} are allowed", param="tools")
    check_json(value, "tools")
    return [_function(tool, f"tools[{index}]") for index, tool in enumerate(value)]


def chat_tool_choice(value: Any) -> dict[str, Any]:
    """The fields `tool_choice` and `parallel_tool_calls` of a chat."""
    if not isinstance(value, dict):
        raise wrong_type("tool_choice", "an object", value)
    kind, alone = value.get("type"), value.get("disable_parallel_tool_use")
    if not isinstance(alone, (bool, type(None))):
        raise wrong_type("tool_choice.disable_parallel_tool_use", "a boolean", alone)
    parallel = {"parallel_tool_calls": False} if alone else {}
    if kind == "tool":
        if not isinstance(value.get("name"), str):
            raise wrong_type("tool_choice.name", "a string", value.get("name"))
        return {"tool_choice": {"type": "function", "function": {"name": value["name"]}}, **parallel}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidRequestError("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    return {"tool_choice": _CHOICES[kind], **parallel}


def limited_names(chat: Mapping[str, Any]) -> ToolNames:
    """Call the tools of `chat` as every server can, those in its conversation too; says what each name stands for."""
    offered = [tool["function"] for tool in chat.get("tools", ())]
    called = [call["function"] for message in chat["messages"] for call in message.get("tool_calls", ())]
    choice = chat.get("tool_choice")
    chosen = [choice["function"]] if isinstance(choice, dict) else []
    names = ToolNames.of(key_of(function["name"], None) for function in offered)
    for function in (*offered, *called, *chosen):
        function["name"] = names.of_key(key_of(function["name"], None))
    return names


def _function(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong_type(name, "an object", tool)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        shown = shown_name(str(kind))
        message = f"{name}: tools of type {shown!r} run on Anthropic's servers, or are known to its models alone"
        raise InvalidRequestError(message, param=f"{name}.type")
    refuse_unknown(tool, _KNOWN, name)
    for key, kinds, wanted in (
        ("name", str, "a string"),
        ("description", (str, type(None)), "a string"),
        ("input_schema", dict, "an object"),
        ("strict", (bool, type(None)), "a boolean"),
        ("input_examples", (list, type(None)), "an array"),
        ("allowed_callers", (list, type(None)), "an array"),
    ):
        if not isinstance(tool.get(key), kinds):
            raise wrong_type(f"{name}.{key}", wanted, tool.get(key))
    if "direct" not in (tool.get("allowed_callers") or ["direct"]):
        param = f"{name}.allowed_callers"
        raise InvalidRequestError(f"{param} must hold 'direct': no code calls tools here", param=param)
    schema = dict(tool["input_schema"])
    if tool.get("input_examples"):
        schema["examples"] = tool["input_examples"]  # JSON Schema's own place for them
    described = {"description": tool["description"]} if tool.get("description") else {}
    strict = {"strict": True} if tool.get("strict") else {}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": schema, **strict}}
