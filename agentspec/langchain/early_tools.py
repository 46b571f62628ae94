"""Starts tools of a LangChain agent before its model calls them; `AgentSpecMiddleware` asks it around every call."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

from langchain.agents.middleware.types import ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tools import BaseTool, StructuredTool, Tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.prebuilt.tool_node import ToolCallRequest, ToolRuntime

from agentspec.langchain.labels import asked_by, branch_of_agent, config_of_tool, is_replayed
from agentspec.step.scope import current_labels, current_policy
from agentspec.tools import AgentCaller, ToolCall, ToolPolicy, ToolSession, ToolSpec, ToolSpeculator
from agentspec.tools.speculative_call import contained
from agentspec.types import DEFAULT_TENANT

R = TypeVar("R")

_ADAPTER = "langchain_mcp_adapters.tools"
_APPROVAL = ("needs_approval", "requires_approval")  # in a tool's metadata
_ID = "early"  # of the call that an early start answers
_SILENT = (  # blocks of an answer by which its provider did nothing
    *("text", "text-plain", "refusal", "reasoning", "reasoning_content", "thinking", "redacted_thinking"),
    *("tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call", "input_json_delta"),
)
_QUIET: Any = {"callbacks": [], "tags": ["nostream"]}


@dataclass(frozen=True, slots=True)
class _EarlyResult:
    """What a tool returned that was started early."""

    message: ToolMessage


class EarlyTools:
    """Early starts for the agents of one middleware: `AgentSpecMiddleware(early_tools=EarlyTools(speculator))`.

    Names of read-only tools in place of `speculator` make one that learns in memory. What is learned belongs to
    `tenant` and `agent`, by default the workflow. `identity` distinguishes the credentials with which the tools run.
    In a tool's metadata, `needs_approval` keeps it from an early start.
    """

    def __init__(
        self,
        speculator: ToolSpeculator | Collection[str],
        *,
        tenant: str = DEFAULT_TENANT,
        identity: str = "",
        agent: str | None = None,
    ) -> None:
        if not isinstance(speculator, ToolSpeculator):
            speculator = ToolSpeculator(ToolPolicy(speculator))
        self._speculator = speculator
        self._agent = agent
        self._tenant, self._identity = tenant, identity

    def begin(self, request: ModelRequest[Any]) -> ToolSession | None:
        """Before a model call: start what pays. None where the session is unknown, or a step is replayed."""
        session = self._following(request)
        if session is not None:
            tools = session.functions
            session.begin_turn(lambda call: _started(tools[call.name], call))
        return session

    async def abegin(self, request: ModelRequest[Any]) -> ToolSession | None:
        """`begin` in an event loop."""
        session = self._following(request)
        if session is not None:
            tools = session.functions
            await session.abegin_turn(
                lambda call: _astarted(tools[call.name], call),
                lambda call: (lambda call: _started(tools[call.name], call)) if blocks(tools[call.name]) else None,
            )
        return session

    def end(self, session: ToolSession | None, response: ModelResponse[Any]) -> None:
        """After the model call that `begin` gave the session for."""
        if session is None:
            return
        store, calls = current_policy().store is not False, None
        with contained("ending a turn"):
            messages = [message for message in response.result if isinstance(message, AIMessage)]
            calls = [call for message in messages for call in (*_by_provider(message), *_tool_calls_of(message))]
        if calls is None:
            session.abandon_turn()
        else:
            session.end_turn(calls, store=store)

    def run(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], R]) -> R:
        """Run a tool that the model called. The handler, and other middleware after it, are called in any case."""
        session = self._session_of(_messages(request.state))
        if session is None:
            return handler(request)
        result = session.run(_tool_call_of(session, request), lambda _: handler(request))
        return handler(_answered(request, result)) if isinstance(result, _EarlyResult) else result

    async def arun(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[R]]) -> R:
        """`run` in an event loop."""
        session = self._session_of(_messages(request.state))
        if session is None:
            return await handler(request)
        result = await session.arun(_tool_call_of(session, request), lambda _: handler(request))
        return await handler(_answered(request, result)) if isinstance(result, _EarlyResult) else result

    def _session_of(self, messages: Sequence[AnyMessage]) -> ToolSession | None:
        """The session by its label, else by the id of its first message."""
        labels = current_labels()
        name = labels.session or (messages[0].id if messages else None)
        if not name:
            return None
        agent = self._agent or labels.workflow or "agent"
        try:
            identity = self._identity + asked_by()
        except (ValueError, TypeError, RecursionError):  # one that knows no tools: all may change something
            return ToolSession(self._speculator, AgentCaller(self._tenant, agent, name))
        return self._speculator.session(AgentCaller(self._tenant, agent, name, identity, branch=branch_of_agent()))

    def _following(self, request: ModelRequest[Any]) -> ToolSession | None:
        """The session, which now knows the messages of the request."""
        with contained("beginning a turn"):
            asked_by()  # raises, and is logged, where it cannot be known who asks
            # As in the node of the tools: other middleware may give the model other messages.
            session = self._session_of(_messages(request.state) or request.messages)
            if session is not None and is_replayed():
                session.abandon_turn()
            elif session is not None:
                self._follow(session, request)
                return session
        return None

    def _follow(self, session: ToolSession, request: ModelRequest[Any]) -> None:
        offered = {tool.name: tool for tool in request.tools if isinstance(tool, BaseTool)}
        if [*map(id, offered.values())] != [*map(id, session.functions.values())]:
            session.offers([ToolSpec(name, self._takes_more(tool)) for name, tool in offered.items()], offered)
        marks, seen = [_mark(message) for message in request.messages], session.followed
        if marks[: len(seen)] != seen or not seen:  # the first turn, or a history that was changed
            session.restart()
            seen = []
        for message in request.messages[len(seen) :]:
            _report(session, message)
        session.followed = marks

    def _takes_more(self, tool: BaseTool) -> bool:
        """Whether a tool that is listed may not start early all the same."""
        if tool.name not in self._speculator.policy.read_only:
            return False
        try:
            schema = convert_to_openai_tool(tool)["function"].get("parameters") or {}
        except Exception:  # an agent must not fail by a tool that we cannot describe: it does not start early
            return True
        approved = any(bool((tool.metadata or {}).get(name)) for name in _APPROVAL)
        return approved or takes_more(tool, schema) or tool.return_direct


class _AnsweredTool(BaseTool):
    """Stands for a tool that has run already: the same arguments get its result, others run it."""

    ran: BaseTool
    expected: dict[str, Any]
    message: ToolMessage

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        if by_model(input.get("args")) != self.expected:
            return self.ran.invoke(input, config, **kwargs)
        return super().invoke({**input, "args": self.expected}, config, **kwargs)

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        if by_model(input.get("args")) != self.expected:
            return await self.ran.ainvoke(input, config, **kwargs)
        return await super().ainvoke({**input, "args": self.expected}, config, **kwargs)

    def _run(self, **_: Any) -> tuple[Any, Any]:
        return self.message.content, self.message.artifact

    async def _arun(self, **_: Any) -> tuple[Any, Any]:
        return self._run()


def _answered(request: ToolCallRequest, result: _EarlyResult) -> ToolCallRequest:
    """The request with a tool that has the result ready: other middleware and callbacks see it as ever."""
    assert request.tool is not None
    shown = ("name", "description", "args_schema", "tags", "metadata", "callbacks", "handle_validation_error")
    fields = {name: getattr(request.tool, name) for name in shown}
    tool = _AnsweredTool(
        **fields,
        response_format="content_and_artifact",
        ran=request.tool,
        expected=deepcopy(dict(request.tool_call["args"])),  # other middleware may change them in place
        message=result.message,
    )
    return request.override(tool=tool)


def _started(tool: BaseTool, call: ToolCall) -> _EarlyResult:
    """Run a tool outside of the graph's run. Raises for what could not be handed over just as it is."""
    var_child_runnable_config.set(config_of_tool())
    return _usable(tool, tool.invoke(_input(call), _QUIET))


async def _astarted(tool: BaseTool, call: ToolCall) -> _EarlyResult:
    var_child_runnable_config.set(config_of_tool())
    return _usable(tool, await tool.ainvoke(_input(call), _QUIET))


def blocks(tool: BaseTool) -> bool:
    """Whether the tool has no asynchronous way to run, so that it would run in a thread."""
    plain = (BaseTool, StructuredTool, Tool)
    inherited = all(
        any(getattr(type(tool), name) is getattr(kind, name) for kind in plain) for name in ("ainvoke", "_arun")
    )
    return inherited and getattr(tool, "coroutine", None) is None


def _input(call: ToolCall) -> Any:
    return {"type": "tool_call", "id": _ID, "name": call.name, "args": dict(call.arguments)}


def _usable(tool: BaseTool, message: Any) -> _EarlyResult:
    """A plain result. Raises `ValueError` for a `Command`, a failure, or a message that the tool itself has made."""
    if not isinstance(message, ToolMessage) or (message.tool_call_id, message.name) != (_ID, tool.name):
        raise ValueError("not a plain result")
    if message.status == "error" or message.additional_kwargs or message.response_metadata or message.id:
        raise ValueError("not a plain result")
    parts = message.content if isinstance(message.content, list) else []
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        raise ValueError("not a plain text")
    return _EarlyResult(message)


def _report(session: ToolSession, message: AnyMessage) -> None:
    if isinstance(message, HumanMessage):
        session.says(message.text)
    elif isinstance(message, ToolMessage):
        session.returns(message.name or "", message.text)
    elif isinstance(message, AIMessage):
        session.recalls(_tool_calls_of(message))


def _mark(message: AnyMessage) -> str:
    """The same for the same message."""
    return f"{message.type}:{message.id or hash(message.text)}"


def _tool_calls_of(message: AIMessage) -> list[ToolCall]:
    return [ToolCall(call["name"], call["args"]) for call in message.tool_calls]


def _by_provider(message: AIMessage) -> list[ToolCall]:
    """What the provider ran itself while it answered, tools of other servers among it: it may change something."""
    parts = message.content if isinstance(message.content, list) else []
    parts = [*parts, *message.additional_kwargs.get("tool_outputs", ())]
    kinds = [str(part.get("type", "text")) for part in parts if isinstance(part, dict)]
    return [ToolCall(f"({kind})", {}) for kind in kinds if kind not in _SILENT]


def _tool_call_of(session: ToolSession, request: ToolCallRequest) -> ToolCall:
    """The call; that of an unknown tool if other middleware runs another tool than the one that was offered."""
    name = request.tool_call["name"]
    known = session.functions.get(name) is request.tool
    return ToolCall(name if known else f"(instead of {name})", request.tool_call["args"])


def _messages(state: Any) -> Sequence[AnyMessage]:
    if isinstance(state, list):
        return state
    messages = state.get("messages") if isinstance(state, dict) else getattr(state, "messages", None)
    return messages if isinstance(messages, list) else []


def takes_more(tool: BaseTool, schema: Mapping[str, Any]) -> bool:
    """Whether the tool's function has parameters that the model does not fill; `schema` is that of the model's."""
    coroutine = getattr(tool, "coroutine", None)
    if getattr(coroutine, "__module__", None) == _ADAPTER and "runtime" not in schema.get("properties", {}):
        return _shows_runtime(coroutine)
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


def _shows_runtime(function: Any) -> bool:
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
