"""Early starts in the OpenAI Agents SDK: `early_tools` wraps an agent's tools, `EarlyToolHooks` follows a session."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

from agentspec.errors import needs_extra
from agentspec.step.scope import current_policy
from agentspec.tools import AgentCaller, ToolCall, ToolSession, ToolSpec, ToolSpeculator
from agentspec.tools.faults import kept_from_agent
from agentspec.types import DEFAULT_TENANT

with needs_extra("openai-agents"):
    from agents import Agent, FunctionTool, ModelResponse, RunContextWrapper, RunHooks, Tool, TResponseInputItem
    from agents.tool import set_function_tool_failure_error_function
    from agents.tool_context import ToolContext

_SILENT = ("message", "reasoning")  # items of an answer by which nothing is done

_sessions: WeakKeyDictionary[RunContextWrapper[Any], ToolSession] = WeakKeyDictionary()
"""By the context of a tool's call, the session that it belongs to, from `on_tool_start` until the tool runs."""


def early_tools(tools: Iterable[Tool]) -> list[Tool]:
    """The tools of an agent, those that could start early wrapped, the others as they are.

    Wrapped are functions made by `function_tool` that take no run context, need no approval, have no input guardrails
    and are always enabled. Whether one starts early is for the speculator's policy to say. Without `EarlyToolHooks`
    in the run a wrapped tool runs as ever.
    """
    return [_wrapped(tool) if isinstance(tool, FunctionTool) and _is_plain(tool) else tool for tool in tools]


class EarlyToolHooks(RunHooks[Any]):
    """Hooks of the runs of one session: `Runner.run(agent, ..., hooks=EarlyToolHooks(speculator, session="user-7"))`.

    What is learned belongs to `tenant` and `agent`, by default the name of the running agent. `identity` tells apart
    the credentials with which the tools run. Without `store` nothing is learned. Hooks of your own can be a subclass
    whose methods call these. Tools also start once the model names them, if `hears` is told a streamed run's events.
    """

    def __init__(
        self,
        speculator: ToolSpeculator,
        *,
        session: str,
        agent: str | None = None,
        tenant: str = DEFAULT_TENANT,
        identity: str = "",
        store: bool = True,
    ) -> None:
        self._speculator = speculator
        self._agent = agent
        self._caller = AgentCaller(tenant, agent or "", session, identity, store)
        self._seen: dict[AgentCaller, list[int]] = {}
        self._speaking: ToolSession | None = None
        self._running: defaultdict[str, list[AbstractContextManager[None]]] = defaultdict(list)

    async def on_llm_start(
        self,
        context: RunContextWrapper[Any],
        agent: Agent[Any],
        system_prompt: str | None,
        input_items: list[TResponseInputItem],
    ) -> None:
        session, tools = None, {}
        with kept_from_agent("beginning a turn"):
            tools = {one.qualified_name: one for one in agent.tools if isinstance(one, FunctionTool)}
            session = self._following(agent, tools.values(), system_prompt, input_items)
        self._speaking = session
        if session is not None:
            await session.abegin_turn(
                lambda call: _started(tools[call.name], call),
                lambda call: (
                    (lambda call: asyncio.run(_started(tools[call.name], call))) if _blocks(tools[call.name]) else None
                ),
            )

    async def on_llm_end(self, context: RunContextWrapper[Any], agent: Agent[Any], response: ModelResponse) -> None:
        session, calls = self._session(agent), None
        with kept_from_agent("ending a turn"):
            calls = _calls_of(response)
        if calls is None:
            session.abandon_turn()
        else:
            session.end_turn(calls, store=current_policy().store is not False)

    def hears(self, event: object) -> None:
        """An event of `stream_events()` of a run with these hooks: a tool that the model names starts if it pays."""
        data = _field(event, "data")
        item = _field(data, "item")
        if self._speaking is None or _field(data, "type") != "response.output_item.added":
            return
        if _kind(item) == "function_call":
            self._speaking.names(_qualified(str(_field(item, "name")), _field(item, "namespace")))

    async def on_tool_start(self, context: RunContextWrapper[Any], agent: Agent[Any], tool: Tool) -> None:
        session = self._session(agent)
        if isinstance(tool, FunctionTool) and isinstance(tool.on_invoke_tool, _EarlyInvoker):
            _sessions[context] = session
        else:
            changing = session.changing(ToolCall(_name(tool), {}))
            changing.__enter__()
            self._running[_name(tool)].append(changing)

    async def on_tool_end(self, context: RunContextWrapper[Any], agent: Agent[Any], tool: Tool, result: object) -> None:
        # A tool that failed, or was cancelled and may go on in a thread, is not told here: nothing starts early
        # any more while these hooks are in use.
        if self._running[_name(tool)]:
            self._running[_name(tool)].pop().__exit__(None, None, None)

    def _session(self, agent: Agent[Any]) -> ToolSession:
        who = self._caller
        return self._speculator.session(
            AgentCaller(who.tenant, self._agent or agent.name, who.session, who.identity, who.store)
        )

    def _following(
        self,
        agent: Agent[Any],
        tools: Iterable[FunctionTool],
        system_prompt: str | None,
        items: Sequence[TResponseInputItem],
    ) -> ToolSession:
        session = self._session(agent)
        session.offers([_spec(tool) for tool in tools], {tool.qualified_name: tool.on_invoke_tool for tool in tools})
        marks = [hash(str(item)) for item in items]
        seen = self._seen.get(session.caller, [])
        if marks[: len(seen)] != seen or not seen:  # the first turn, or a history that was changed
            session.restart()
            session.reads(system_prompt or "")
            seen = []
        names = {str(item.get("call_id")): str(item.get("name")) for item in items if _kind(item) == "function_call"}
        for item in items[len(seen) :]:
            _tell(session, item, names)
        self._seen[session.caller] = marks
        return session


class _EarlyInvoker:
    """Runs a tool for the SDK: hands over what an early start has ready, else runs it as ever."""

    def __init__(self, tool: FunctionTool) -> None:
        self.tool = tool

    async def __call__(self, context: ToolContext[Any], arguments: str) -> Any:
        session, run = _sessions.pop(context, None), self.tool.on_invoke_tool
        if session is None:
            return await run(context, arguments)
        parsed = _arguments(arguments)
        if parsed is None:  # the SDK tells the model so
            with session.changing(None):
                return await run(context, arguments)
        call = ToolCall(_qualified(context.tool_name, context.tool_namespace), parsed)
        return await session.arun(call, lambda _: run(context, arguments))


def _wrapped(tool: FunctionTool) -> FunctionTool:
    wrapped = copy(tool)
    wrapped.on_invoke_tool = _EarlyInvoker(tool)
    return wrapped


def _is_plain(tool: FunctionTool) -> bool:
    """Whether the tool's result depends on its arguments alone, and nobody has a say before it runs."""
    function = getattr(tool, "__wrapped__", None)
    if function is None or tool.is_enabled is not True or _is_guarded(tool):
        return False
    filled = tool.params_json_schema.get("properties", {})
    return all(name in filled for name in inspect.signature(function).parameters)


def _is_guarded(tool: FunctionTool) -> bool:
    return tool.needs_approval is not False or bool(tool.tool_input_guardrails)


def _spec(tool: FunctionTool) -> ToolSpec:
    wrapped = isinstance(tool.on_invoke_tool, _EarlyInvoker)
    schema = tool.params_json_schema
    return ToolSpec(tool.qualified_name, schema, needs_approval=_is_guarded(tool), injected=not wrapped)


def _inner(tool: FunctionTool) -> FunctionTool:
    assert isinstance(tool.on_invoke_tool, _EarlyInvoker)
    return tool.on_invoke_tool.tool


async def _started(tool: FunctionTool, call: ToolCall) -> Any:
    """Run a tool outside of the run's turns. Raises what the function raises, for which the SDK would make a text."""
    bare = set_function_tool_failure_error_function(copy(_inner(tool)), None)
    arguments = json.dumps(dict(call.arguments))
    context = ToolContext(None, tool_name=tool.name, tool_call_id="early", tool_arguments=arguments)
    return await bare.on_invoke_tool(context, arguments)


def _blocks(tool: FunctionTool) -> bool:
    """Whether the SDK runs the function in a thread, which goes on when nobody wants the result any more."""
    function: Any = _inner(tool).__wrapped__
    return not any(inspect.iscoroutinefunction(one) for one in (function, getattr(function, "__call__", None)))  # noqa: B004


def _calls_of(response: ModelResponse) -> list[ToolCall] | None:
    """The calls of an answer, those of the provider's own tools by their kind; None if one cannot be read."""
    calls = []
    for item in response.output:
        kind = _kind(item)
        if kind in _SILENT:
            continue
        call = _call(item) if kind == "function_call" else ToolCall(kind, {})
        if call is None:
            return None
        calls.append(call)
    return calls


def _tell(session: ToolSession, item: TResponseInputItem, names: dict[str, str]) -> None:
    role, kind = _field(item, "role"), _kind(item)
    if role == "user":
        session.says(_text(_field(item, "content")))
    elif role in ("system", "developer"):
        session.reads(_text(_field(item, "content")))
    elif kind == "function_call":
        call = _call(item)
        session.recalls([] if call is None else [call])
    elif kind.endswith("_output"):
        session.returns(names.get(str(_field(item, "call_id")), kind), _text(_field(item, "output")))


def _call(item: Any) -> ToolCall | None:
    arguments = _arguments(_field(item, "arguments"))
    name = _qualified(str(_field(item, "name")), _field(item, "namespace"))
    return None if arguments is None else ToolCall(name, arguments)


def _arguments(text: Any) -> dict[str, Any] | None:
    """The arguments of a call; None for what is no JSON object."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _qualified(name: str, namespace: str | None) -> str:
    """As `FunctionTool.qualified_name`; where the SDK invents a namespace it is the name of no tool."""
    return f"{namespace}.{name}" if namespace else name


def _name(tool: Tool) -> str:
    return tool.qualified_name if isinstance(tool, FunctionTool) else tool.name


def _kind(item: Any) -> str:
    return str(_field(item, "type") or "message")


def _field(item: Any, name: str) -> Any:
    """A field of an item, which the SDK holds as an object or as a dictionary."""
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)


def _text(content: Any) -> str:
    """The text of a content, which may come in parts."""
    parts = content if isinstance(content, list) else [content]
    texts = [one if isinstance(one, str) else _field(one, "text") for one in parts]
    return "\n".join(str(text) for text in texts if text)
