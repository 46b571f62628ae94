"""What LangChain gives to tools besides the model's arguments: state, a store, a runtime, a config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from langchain_core.tools import BaseTool
from langgraph.prebuilt.tool_node import ToolRuntime

_ADAPTER = "langchain_mcp_adapters.tools"


def takes_more(tool: BaseTool, schema: Mapping[str, Any]) -> bool:
    """Whether the tool's function has parameters that the model does not fill; `schema` is that of the model's."""
    coroutine = getattr(tool, "coroutine", None)
    if getattr(coroutine, "__module__", None) == _ADAPTER and "runtime" not in schema.get("properties", {}):
        return _tells_others(coroutine)
    functions = (getattr(tool, "func", None), coroutine)
    if not any(functions):
        functions = (type(tool)._run, type(tool)._arun)  # noqa: SLF001  where a subclass says what it takes
    # A parameter of the name `runtime` gets the graph's, whatever the schema says.
    filled = {*schema.get("properties", {}), "self", "run_manager"} - {"runtime"}
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for function in functions:
        if function is not None:
            parameters = inspect.signature(function).parameters.values()
            if any(one.kind in named and one.name not in filled for one in parameters):
                return True
    fields = getattr(tool.args_schema, "model_fields", None)
    return fields is not None and not {*fields} <= filled


def _tells_others(function: Any) -> bool:
    """Whether the function of an MCP tool gives its runtime, or news of the call, to anything besides the server.

    The function that langchain-mcp-adapters (0.3) makes for each tool takes a `runtime`, of which only its
    interceptors learn; callbacks get the server's progress, and its questions to the user. It holds both as variables
    of its closure. Where they cannot be found it may do anything.
    """
    held = inspect.getclosurevars(function).nonlocals
    if not {"tool_interceptors", "callbacks"} <= held.keys():
        return True
    callbacks = held["callbacks"]
    return bool(held["tool_interceptors"]) or (callbacks is not None and any(vars(callbacks).values()))


def by_model(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call without the runtime that the graph has added."""
    return {name: value for name, value in arguments.items() if not isinstance(value, ToolRuntime)}
