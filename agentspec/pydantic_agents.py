"""Early starts in Pydantic AI: `Agent(model, tools=[...], capabilities=[EarlyToolCapability(speculator)])`."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_ai import RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    NativeToolCallPart,
    PartStartEvent,
    SystemPromptPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.toolsets import AbstractToolset, FunctionToolset, ToolsetTool, WrapperToolset

from agentspec.step.scope import current_policy
from agentspec.tools import AgentCaller, ToolCall, ToolSession, ToolSpec, ToolSpeculator
from agentspec.tools.faults import kept_from_agent
from agentspec.types import DEFAULT_TENANT

_MOST = 1024  # conversations that are followed
_APPROVAL = ("needs_approval", "requires_approval")
_HANDLERS = ("sampling_handler", "elicitation_handler", "log_handler", "progress_handler", "message_handler")


@dataclass
class _Conversation:
    """What is known of a conversation: its messages so far, its tools, and the calls that the model has made."""

    session: ToolSession
    seen: list[int] = field(default_factory=list)
    toolset: AbstractToolset[Any] | None = None
    tools: dict[str, ToolsetTool[Any]] = field(default_factory=dict)
    calls: dict[str, ToolCall] = field(default_factory=dict)  # of the latest answer, by id


class EarlyToolCapability(AbstractCapability[Any]):  # type: ignore[misc]  # Pydantic AI is not there when types are checked
    """Lets tools start before the model calls them, those that the speculator's policy allows.

    A session is the conversation (`conversation_id`). What is learned belongs to `tenant` and `agent`, by default the
    agent's name. `identity` tells apart the credentials with which the tools run. `servers` tells by an MCP server's
    name which toolset is its own: their tools may start early if the policy trusts the server and the tool's metadata
    has `readOnlyHint`. Functions that take a `RunContext`, need approval, run alone (`sequential`), or have a validator
    or a `prepare` of their own do not start early, nor does a tool with `needs_approval` in its metadata.
    With `stream` models stream in every run, and tools also start once the model has written their names.
    """

    def __init__(
        self,
        speculator: ToolSpeculator,
        *,
        tenant: str = DEFAULT_TENANT,
        agent: str | None = None,
        identity: str = "",
        servers: Mapping[str, AbstractToolset[Any]] | None = None,
        stream: bool = False,
    ) -> None:
        self._speculator = speculator
        self._tenant, self._agent, self._identity = tenant, agent, identity
        self._servers = dict(servers or {})
        self._stream = stream
        self._conversations: OrderedDict[AgentCaller, _Conversation] = OrderedDict()

    def get_wrapper_toolset(self, toolset: AbstractToolset[Any]) -> AbstractToolset[Any]:
        return _EarlyToolset(toolset, self)

    @property
    def has_on_event(self) -> bool:
        """Whether Pydantic AI is to stream every model, so that `on_event` is told what comes."""
        return self._stream

    async def on_event(self, ctx: RunContext[Any], *, event: Any) -> None:
        """The model has written the name of a tool."""
        if isinstance(event, PartStartEvent) and isinstance(event.part, ToolCallPart):
            self.of(ctx).session.names(event.part.tool_name)

    async def wrap_model_request(self, ctx: RunContext[Any], *, request_context: Any, handler: Any) -> ModelResponse:
        """Start what is likely to be called, and drop or keep it by what is."""
        conversation = None
        with kept_from_agent("beginning a turn"):
            conversation = self._following(ctx, request_context.messages)
        if conversation is not None:
            await _begin(conversation, ctx)
        try:
            response: ModelResponse = await handler(request_context)
        except BaseException:
            if conversation is not None:
                conversation.session.abandon_turn()
            raise
        if conversation is not None:
            _end(conversation, response, {tool.name for tool in request_context.model_request_parameters.output_tools})
        return response

    async def wrap_output_process(self, ctx: RunContext[Any], *, output_context: Any, output: Any, handler: Any) -> Any:
        """A function that the agent's output is given to may change something."""
        if not output_context.has_function:
            return await handler(output)
        with self.of(ctx).session.changing(None):
            return await handler(output)

    def of(self, ctx: RunContext[Any]) -> _Conversation:
        """The conversation of a run."""
        name = self._agent or (ctx.agent.name if ctx.agent is not None else None) or "agent"
        caller = AgentCaller(self._tenant, name, str(ctx.conversation_id or ctx.run_id), self._identity)
        session = self._speculator.session(caller)
        known = self._conversations.get(caller)
        if known is None or known.session is not session:
            known = self._conversations[caller] = _Conversation(session)
        self._conversations.move_to_end(caller)
        while len(self._conversations) > _MOST:
            self._conversations.popitem(last=False)
        return known

    def _following(self, ctx: RunContext[Any], messages: list[ModelMessage]) -> _Conversation:
        conversation = self.of(ctx)
        session, tools = conversation.session, conversation.tools
        sources = {name: _source(tool) for name, tool in tools.items()}
        session.offers([self._spec(tool) for tool in tools.values()], {n: _function(one) for n, one in sources.items()})
        marks = [hash(str(message.parts)) for message in messages]
        if marks[: len(conversation.seen)] != conversation.seen or not conversation.seen:
            session.restart()
            conversation.seen = []
        for message in messages[len(conversation.seen) :]:
            _tell(session, message)
        conversation.seen = marks
        return conversation

    def _spec(self, tool: ToolsetTool[Any]) -> ToolSpec:
        about, source = tool.tool_def, _source(tool)
        metadata = about.metadata or {}
        server = next((name for name, one in self._servers.items() if one is source.toolset), None)
        hints = metadata.get("annotations") or {}
        return ToolSpec(
            about.name,
            about.parameters_json_schema,
            server=server,
            read_only_hint=isinstance(hints, Mapping) and hints.get("readOnlyHint") is True,
            needs_approval=about.kind != "function" or any(metadata.get(name) for name in _APPROVAL),
            injected=about.sequential or not (_is_plain(source) if server is None else _asks_nobody(source)),
        )


@dataclass
class _EarlyToolset(WrapperToolset[Any]):  # type: ignore[misc]
    """All tools of an agent; a call whose result is there gets it."""

    early: EarlyToolCapability

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        tools: dict[str, ToolsetTool[Any]] = await super().get_tools(ctx)
        conversation = self.early.of(ctx)
        conversation.toolset, conversation.tools = self.wrapped, dict(tools)
        return tools

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> Any:
        conversation = self.early.of(ctx)
        call = conversation.calls.get(str(ctx.tool_call_id))
        run = super().call_tool
        if call is None or call.name != name or not _same(tool, call, tool_args):
            with conversation.session.changing(None):
                return await run(name, tool_args, ctx, tool)
        return await conversation.session.arun(call, lambda _: run(name, tool_args, ctx, tool))


async def _begin(conversation: _Conversation, ctx: RunContext[Any]) -> None:
    toolset, tools = conversation.toolset, dict(conversation.tools)

    async def start(call: ToolCall) -> Any:
        assert toolset is not None
        tool = tools[call.name]
        early = replace(ctx, tool_name=call.name, tool_call_id="early", tool_call_approved=False)
        return await toolset.call_tool(call.name, _validated(tool, call), early, tool)

    def in_thread(call: ToolCall) -> Any:
        blocks = getattr(_source(tools[call.name]), "is_async", True) is False
        return (lambda call: asyncio.run(start(call))) if blocks and _is_of_sdk(toolset) else None

    await conversation.session.abegin_turn(start, in_thread)


def _end(conversation: _Conversation, response: ModelResponse, outputs: Collection[str]) -> None:
    made: list[tuple[str, ToolCall]] | None = None
    with kept_from_agent("ending a turn"):
        made = list(_made(response, outputs))
    if made is None:
        conversation.session.abandon_turn()
        return
    conversation.calls = {id: call for id, call in made if call.name in conversation.tools}
    conversation.session.end_turn([call for _, call in made], store=current_policy().store is not False)


def _made(response: ModelResponse, outputs: Collection[str]) -> Iterator[tuple[str, ToolCall]]:
    """The calls of an answer, each with its id, those of the provider's own tools too, without the `outputs`."""
    for part in response.parts:
        if isinstance(part, NativeToolCallPart):
            yield part.tool_call_id, ToolCall(f"({part.tool_name})", {})  # not a tool of the agent that has this name
        elif isinstance(part, ToolCallPart) and part.tool_name not in outputs:
            yield part.tool_call_id, _call(part)


def _call(part: ToolCallPart) -> ToolCall:
    return ToolCall(part.tool_name, part.args_as_dict(raise_if_invalid=True))


def _readable(part: ToolCallPart) -> ToolCall | None:
    """An earlier call; None if its arguments are no JSON object, which the SDK has told the model."""
    try:
        return _call(part)
    except (ValueError, AssertionError):
        return None


def _tell(session: ToolSession, message: ModelMessage) -> None:
    if isinstance(message, ModelRequest):
        for part in message.parts:
            if isinstance(part, UserPromptPart):
                session.says("\n".join(_texts(part.content)))
            elif isinstance(part, SystemPromptPart):
                session.reads(part.content)
            elif isinstance(part, ToolReturnPart):
                session.returns(part.tool_name, part.model_response_str())
    else:
        calls = [_readable(part) for part in message.parts if isinstance(part, ToolCallPart)]
        session.recalls([call for call in calls if call is not None])


def _texts(content: Any) -> Iterator[str]:
    for one in [content] if isinstance(content, str) else content:
        if isinstance(one, str):
            yield one


def _validated(tool: ToolsetTool[Any], call: ToolCall) -> dict[str, Any]:
    """The arguments as the SDK gives them to the tool. Raises for those that do not fit its schema."""
    return dict(tool.args_validator.validate_python(dict(call.arguments)))


def _same(tool: ToolsetTool[Any], call: ToolCall, arguments: dict[str, Any]) -> bool:
    """Whether the tool gets what the model wrote, which hooks may have changed."""
    with kept_from_agent("comparing a call"):
        return _validated(tool, call) == arguments
    return False


def _source(tool: Any) -> Any:
    """The tool as the toolset made it that holds it."""
    while (inner := getattr(tool, "source_tool", None)) is not None:
        tool = inner
    return tool


def _declared(source: Any) -> Any:
    """The `Tool` of a function; None for tools of another kind."""
    if not isinstance(source.toolset, FunctionToolset):
        return None
    return source.toolset.tools.get(getattr(source, "original_name", None) or source.tool_def.name)


def _is_of_sdk(toolset: Any) -> bool:
    """Whether a toolset and all within it are the SDK's. One of the user's may need the loop that the agent runs in."""
    inner = [*getattr(toolset, "toolsets", ()), getattr(toolset, "wrapped", None)]
    own = type(toolset).__module__.partition(".")[0] == "pydantic_ai"
    return own and all(_is_of_sdk(one) for one in inner if one is not None)


def _function(source: Any) -> object:
    """What runs for a tool: another object is another tool."""
    declared = _declared(source)
    return source.toolset if declared is None else declared.function


def _is_plain(source: Any) -> bool:
    """Whether a function's result depends on its arguments alone, and nobody has a say before it runs."""
    tool = _declared(source)
    if tool is None or tool.takes_ctx or tool.prepare is not None or tool.requires_approval:
        return False
    return source.args_validator_func is None


def _asks_nobody(source: Any) -> bool:
    """Whether nothing besides its server learns of a tool's call: no hook, and nobody whom the server tells or asks."""
    toolset = source.toolset
    if source.args_validator_func is not None or getattr(toolset, "process_tool_call", None) is not None:
        return False
    if not hasattr(toolset, "client"):
        return True
    options = getattr(toolset, "_client_options", None)  # none: a client that was made elsewhere, with whatever it has
    heard = any(options.get(name) for name in _HANDLERS) if options is not None else True
    return not heard and getattr(toolset, "sampling_model", None) is None
