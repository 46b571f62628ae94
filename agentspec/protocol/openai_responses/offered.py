"""Which tools a Responses request offers its model: its own, and those that its conversation brought.

An `additional_tools` item adds tools from its turn on, the output of a search loads what was found. A tool with
`defer_loading` that nobody loaded is not offered: the description of the search names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.openai_responses.items import ADDITIONAL_TOOLS, SEARCH_OUTPUT, Item
from agentspec.protocol.openai_responses.tool_names import SEARCH, Key, ToolNames
from agentspec.protocol.openai_responses.tools import ClientTool, client_tools
from agentspec.protocol.requests import MAX_TOOLS


def brought_tools(items: Sequence[Item], param: str, *, enforce: bool) -> list[ClientTool]:
    """The tools that `items` bring, in order; `param` names an item, with `{}` for its place.

    Raises `InvalidRequestError` as `client_tools` does.
    """
    brought: list[ClientTool] = []
    for index, item in enumerate(items):
        if item["type"] not in (ADDITIONAL_TOOLS, SEARCH_OUTPUT):
            continue
        place = f"{param.format(index)}.tools"
        tools = client_tools(item["tools"], enforce=enforce, param=place)
        brought += tools if item["type"] == ADDITIONAL_TOOLS else map(_loaded, tools)
    return brought


def _loaded(tool: ClientTool) -> ClientTool:
    if tool.kind == SEARCH:
        raise InvalidRequestError(f"{tool.param}: a search cannot find {SEARCH}", param=f"{tool.param}.type")
    return replace(tool, deferred=False)


def offered_tools(known: Iterable[ClientTool]) -> list[ClientTool]:
    """Those of `known` that the model may be shown; of one name the last, as the newest.

    Raises `InvalidRequestError` for a deferred tool that no search of the client can find, and for more than
    `MAX_TOOLS`.
    """
    latest: dict[Key, ClientTool] = {}
    for tool in known:
        if not (tool.deferred and tool.key in latest):  # what was loaded stays loaded
            latest[tool.key] = tool
    deferred = [tool for tool in latest.values() if tool.deferred]
    shown = [tool for tool in latest.values() if not tool.deferred]
    if deferred and all(tool.kind != SEARCH for tool in shown):
        param = f"{deferred[0].param}.defer_loading"
        raise InvalidRequestError(f"{param} needs a tool {SEARCH} with execution = client", param=param)
    if len(shown) > MAX_TOOLS:
        message = f"the conversation brings more than {MAX_TOOLS} tools, those of namespaces counted"
        raise InvalidRequestError(message, param="input")
    return [_listing(tool, deferred) if tool.kind == SEARCH else tool for tool in shown]


def _listing(search: ClientTool, deferred: Sequence[ClientTool]) -> ClientTool:
    """The search, told what it can find: of a namespace what it is for, of other tools what they do."""
    found: dict[str, Any] = {}
    for tool in deferred:
        if tool.namespace is None:
            found[tool.name] = tool.function.get("description")
        else:
            found.setdefault(tool.namespace, tool.about)
    if not found:
        return search
    lines = [f"- {name}: {about}" if isinstance(about, str) else f"- {name}" for name, about in found.items()]
    head = search.function.get("description")
    told = "\n".join([*([head, ""] if isinstance(head, str) else []), "It can find:", *lines])
    return replace(search, function={**search.function, "description": told})


def chat_tools(tools: Iterable[ClientTool], names: ToolNames) -> list[dict[str, Any]]:
    """`tools` as a chat request has them. What a namespace is for is told once, by its first tool."""
    told: set[str] = set()
    functions: list[dict[str, Any]] = []
    for tool in tools:
        function: Mapping[str, Any] = {"name": names.of_key(tool.key), **tool.function}
        if tool.about and tool.namespace not in told and isinstance(own := function.get("description", ""), str):
            function = {**function, "description": f"{tool.about}\n\n{own}".rstrip()}
        told.add(tool.namespace or "")
        functions.append({"type": "function", "function": function})
    return functions
