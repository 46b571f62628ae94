"""Leaves out what only a hosted service can do: its tools, and what a conversation shows of their calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from agentspec.protocol.openai_responses.items import ADDITIONAL_TOOLS
from agentspec.protocol.validation import shown_name

_OWN_TOOLS = frozenset({None, "function", "custom", "namespace"})  # that a client runs
# Items of the Responses API and blocks of the Messages API that belong to calls of other tools.
_HOSTED = re.compile(
    r"(?:web_search|file_search|code_interpreter|image_generation|computer|(?:local_)?shell|apply_patch|tool_search|mcp)"
    r"_(?:call|call_output|output)|mcp_(?:list_tools|approval_request|approval_response|tool_use|tool_listing)"
    r"|program(?:_output)?|server_tool_use|\w+_tool_result|container_upload"
)


def without_hosted_tools(fields: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The fields of a body without these, and the kinds of what is left out."""
    gone: list[Mapping[str, Any]] = []
    left = {**fields, "tools": _without(fields.get("tools"), _is_hosted_tool, gone)}
    names = {str(one.get(name)) for one in gone for name in ("type", "name") if one.get(name)}
    if left.pop("web_search_options", None):
        gone.append({"type": "web_search_options"})
    for name in ("input", "messages"):
        if isinstance(given := _without(fields.get(name), _is_of_hosted_call, gone), list):
            left[name] = [one for one in (_reduced(item, gone) for item in given) if one is not None]
    if not gone:
        return fields, []
    choice = fields.get("tool_choice")
    chosen = choice if isinstance(choice, dict) else {}
    if not left["tools"] or names & {str(chosen.get(name)) for name in ("type", "name")}:
        left.pop("tool_choice", None)
    if isinstance(include := fields.get("include"), list):  # what hosted tools are to show
        left["include"] = [one for one in include if "_call" not in str(one)]
    kinds = sorted({re.sub(r"[^\w.,? -]", "?", shown_name(str(one["type"]))) for one in gone})
    return left, kinds[:16]


def _is_hosted_tool(kind: Any) -> bool:
    return kind not in _OWN_TOOLS if isinstance(kind, str | None) else True


def _is_of_hosted_call(kind: Any) -> bool:
    return isinstance(kind, str) and _HOSTED.fullmatch(kind) is not None


def _without(values: Any, hosted: Callable[[Any], bool], gone: list[Mapping[str, Any]]) -> Any:
    """`values`, if they are an array, without objects of hosted types, which are added to `gone`."""
    if not isinstance(values, list):
        return values
    found = [one for one in values if isinstance(one, dict) and hosted(one.get("type"))]
    gone += found
    return [one for one in values if one not in found] if found else values


def _reduced(item: Any, gone: list[Mapping[str, Any]]) -> Any:
    """An item or a message without the hosted tools that it adds and the blocks of hosted calls; None if it is empty
    then.
    """
    if not isinstance(item, dict):
        return item
    adds = item.get("type") == ADDITIONAL_TOOLS
    name = "tools" if adds else "content"
    left = _without(item.get(name), _is_hosted_tool if adds else _is_of_hosted_call, gone)
    if left is item.get(name):
        return item
    return {**item, name: left} if left else None
