"""Tools of a LangChain agent that start before the model calls them: the same messages, with fewer runs to wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import ensure_config
from langchain_core.tools import BaseTool, InjectedToolArg, StructuredTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import InjectedState
from pydantic import SecretStr

from agentspec import StepPolicy
from agentspec.langchain import AgentSpecMiddleware, ChatAgentSpec, EarlyTools
from agentspec.runtime import Runtime
from agentspec.step import current_labels, current_policy, headers, report
from agentspec.testing import FakeBackend
from agentspec.tools import ToolEvent, ToolPolicy, ToolSpeculator
from agentspec.types import Labels

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("likely_starts_pay")]

ran: list[str] = []
scopes: list[tuple[Labels, StepPolicy]] = []
asked_by_tools: list[ChatAgentSpec] = []
sent: list[str | None] = []  # by model calls: how many tools were early
stock = {"#W1": 1, "#W2": 2}


@tool
def look(order: str, full: bool = False) -> dict[str, Any]:
    """Read an order."""
    ran.append("look")
    scopes.append((current_labels(), current_policy()))
    for model in asked_by_tools:
        model.invoke(order)
    if order not in stock:
        raise KeyError(order)
    return {"order": order, "left": stock[order], "full": full}


@tool
def buy(order: str) -> str:
    """Buy an order."""
    ran.append("buy")
    stock[order] -= 1
    return "bought"


@tool
def peek(order: str, state: Annotated[dict[str, Any], InjectedState]) -> str:
    """Read with the agent's state."""
    ran.append("peek")
    return f"{order} after {len(state['messages'])}"


@pytest.fixture(autouse=True)
def fresh() -> None:
    ran.clear()
    scopes.clear()
    asked_by_tools.clear()
    stock.update({"#W1": 1, "#W2": 2})
    report().reset()


class ScriptedModel(GenericFakeChatModel):
    disable_streaming: bool = True

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        sent.append(headers().get("x-agentspec-early-tools"))
        return super()._generate(*args, **kwargs)

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self


def asks(name: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call {name}", "type": "tool_call"}])


def agent(middleware: AgentSpecMiddleware, *script: AIMessage, tools: Any = (look, buy, peek), more: Any = ()) -> Any:
    model = ScriptedModel(messages=iter(script))
    return create_agent(model, list(tools), middleware=[middleware, *more], checkpointer=InMemorySaver(), name="shop")


def opened(*names: str, **options: Any) -> tuple[AgentSpecMiddleware, list[ToolEvent]]:
    events: list[ToolEvent] = []
    speculator = ToolSpeculator(ToolPolicy(names or ["look"]), on_event=events.append)
    return AgentSpecMiddleware(early_tools=EarlyTools(speculator), **options), events


def ask(graph: Any, thread: str, text: str) -> list[BaseMessage]:
    config: Any = {"configurable": {"thread_id": thread}}
    return list(graph.invoke({"messages": [HumanMessage(text)]}, config)["messages"])


def shown(messages: list[BaseMessage]) -> list[Any]:
    """All of the messages but the ids that LangGraph invents."""
    return [{**message.model_dump(), "id": None} for message in messages]


SCRIPT = (asks("look", order="#W1"), asks("buy", order="#W2"), asks("look", order="#W2"), AIMessage("done"))


def session(middleware: AgentSpecMiddleware, number: int, **options: Any) -> list[BaseMessage]:
    stock.update({"#W1": 1, "#W2": 2})
    return ask(agent(middleware, *SCRIPT, **options), f"t{number}", "look at #W1, please")


def trained(*names: str, **options: Any) -> tuple[AgentSpecMiddleware, list[ToolEvent]]:
    middleware, events = opened(*names, **options)
    for number in range(8):
        session(middleware, number)
    events.clear()
    return middleware, events


def test_early_starts_leave_messages_unchanged() -> None:
    middleware, events = trained()
    report().reset()
    sent.clear()
    early, plain = session(middleware, 8), session(AgentSpecMiddleware(), 9)
    assert shown(early) == shown(plain)
    hits = len([event.tool for event in events if event.outcome == "hit"])
    assert hits == sum(row.early_tools for row in report()) == sum(map(int, filter(None, sent))) > 0
    assert {event.tool for event in events} == {"look"} and ran.count("buy") == 10


def test_agents_without_a_thread_start_tools_too() -> None:
    middleware, events = opened()
    for _ in range(8):
        stock.update({"#W1": 1, "#W2": 2})
        graph: Any = create_agent(
            ScriptedModel(messages=iter(SCRIPT)), [look, buy], middleware=[middleware], name="shop"
        )
        graph.invoke({"messages": [HumanMessage("look at #W1, please")]})
    assert any(event.outcome == "hit" for event in events)
    assert len({event.session for event in events}) > 1


@pytest.mark.parametrize("policy", [pytest.param(StepPolicy(), marks=pytest.mark.slow), StepPolicy(priority=3)])
def test_an_early_run_has_the_labels_and_the_policy_of_its_call(policy: StepPolicy) -> None:
    middleware, events = trained(policy=policy, policies={"tools": StepPolicy(model="other")})
    scopes.clear()
    report().reset()
    asked_by_tools.append(ChatAgentSpec(model="other", runtime=Runtime(backends={"other": FakeBackend()})))
    session(middleware, 8)
    asked_by_tools.clear()
    assert any(event.outcome == "hit" for event in events)
    assert {row.step: row.calls for row in report()}["model"] == len(SCRIPT)
    early = scopes[:1]
    quiet = AgentSpecMiddleware(early_tools=EarlyTools(ToolSpeculator()), policy=policy, policies=middleware.policies)
    scopes.clear()
    session(quiet, 8)
    assert early == scopes[:1] and early[0][0].step == "tools" and early[0][1].model == "other"


def test_nothing_starts_early_for_a_deadline_of_its_own() -> None:
    middleware, events = opened(policy=StepPolicy(deadline_s=60))
    for number in range(8):
        session(middleware, number)
    assert not events


def test_a_tool_that_other_middleware_substitutes_runs() -> None:
    class Replacing(AgentMiddleware[Any, Any, Any]):
        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            return handler(request.override(tool=other) if request.tool is look else request)

    other = look.model_copy(update={"func": lambda order, full=False: f"another {order}"})
    middleware, events = trained()
    model = ScriptedModel(messages=iter(SCRIPT))
    graph: Any = create_agent(
        model, [look, buy], middleware=[Replacing(), middleware], checkpointer=InMemorySaver(), name="shop"
    )
    messages = ask(graph, "t9", "look at #W1, please")
    assert [message.content for message in messages if message.name == "look"] == ["another #W1", "another #W2"]
    found = {event.outcome for event in events}
    assert "start" in found and "hit" not in found


@pytest.mark.parametrize("error", [pytest.param(ValueError("down"), marks=pytest.mark.slow), KeyboardInterrupt()])
def test_a_model_call_that_fails_drops_what_was_started(error: BaseException) -> None:
    class Failing(AgentMiddleware[Any, Any, Any]):
        def wrap_model_call(self, request: Any, handler: Any) -> Any:
            raise error

    middleware, events = trained()
    with pytest.raises(type(error)):
        session(middleware, 8, more=[Failing()])
    assert [event.outcome for event in events] in (["start", "waste"], ["start", "waste"] * 2)


def test_other_middleware_sees_every_call() -> None:
    seen = []

    class Watching(AgentMiddleware[Any, Any, Any]):
        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            result = handler(request)
            seen.append((request.tool_call["name"], result.content))
            return result.model_copy(update={"content": "hidden"})

    middleware, events = trained()
    messages = session(middleware, 8, more=[Watching()])
    assert any(event.outcome == "hit" for event in events)
    assert [name for name, _ in seen] == ["look", "buy", "look"]
    assert all(message.content == "hidden" for message in messages if isinstance(message, ToolMessage))


def test_middleware_that_changes_the_arguments_gets_what_these_return() -> None:
    class Changing(AgentMiddleware[Any, Any, Any]):
        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            call = request.tool_call
            if call["name"] == "look":
                request = request.override(tool_call={**call, "args": {**call["args"], "full": True}})
            return handler(request)

    middleware, _ = trained()
    messages = session(middleware, 8, more=[Changing()])
    assert '"full": true' in str(messages[2].content)


def test_a_model_that_an_early_tool_asks_streams_no_words() -> None:
    @tool("look")
    def recall(order: str) -> str:
        """Read an order."""
        return str(FakeMessagesListChatModel(responses=[AIMessage(f"inner words of {order}")]).invoke(order).content)

    tools = (recall, buy, peek)
    middleware, events = opened()
    for number in range(8):
        session(middleware, number, tools=tools)
    events.clear()
    graph, config = agent(middleware, *SCRIPT, tools=tools), {"configurable": {"thread_id": "streamed"}}
    stream = graph.stream({"messages": [HumanMessage("look at #W1, please")]}, config, stream_mode="messages")
    words = [message.content for message, _ in stream if isinstance(message, AIMessage)]
    assert [event.outcome for event in events] == ["start", "hit"] * 2
    assert words == ["", "", "", "done"], "the words of the agent itself alone"


def test_names_alone_start_tools_early() -> None:
    for names, started in ([], False), (["look"], True):
        middleware = AgentSpecMiddleware(early_tools=names)
        for number in range(8):
            session(middleware, number)
        assert (ran.count("look") > 16) == started
        ran.clear()


approved = look.model_copy(update={"name": "approved", "metadata": {"needs_approval": True}})


@pytest.mark.parametrize("listed", [peek, approved])
def test_tools_that_take_state_or_need_approval_never_start_early(listed: BaseTool) -> None:
    middleware, events = opened(listed.name)
    for number in range(6):
        ask(
            agent(middleware, asks(listed.name, order="#W1"), AIMessage("done"), tools=[listed]), f"t{number}", "go #W1"
        )
    assert len(ran) == 6 and not events


def asked(graph: Any, **configurable: Any) -> list[BaseMessage]:
    config: Any = {"configurable": {"thread_id": "t", **configurable}}
    return list(graph.invoke({"messages": [HumanMessage("look at #W1, please")]}, config)["messages"])


@tool
def of_user(order: str) -> str:
    """Read an order for the user of the run."""
    ran.append("of_user")
    return f"{order} of {ensure_config().get('configurable', {}).get('user', 'nobody')}"


def test_an_early_run_has_the_callers_configuration_and_serves_no_other_caller() -> None:
    middleware, events = opened("of_user")
    turns = [asks("of_user", order="#W1"), AIMessage("done")]
    for _ in range(8):
        found = asked(agent(middleware, *turns, tools=[of_user]), user="ann")
    assert found[-2].content == "#W1 of ann" and any(event.outcome == "hit" for event in events)
    events.clear()
    late = agent(middleware, AIMessage("hello"), *turns, tools=[of_user])
    asked(late, user="ann")
    assert asked(late, user="bob")[-2].content == "#W1 of bob"
    assert "start" in {event.outcome for event in events}


def test_nothing_starts_early_when_callers_cannot_be_distinguished() -> None:
    middleware, events = opened("of_user")
    turns = [asks("of_user", order="#W1"), AIMessage("done")]
    for _ in range(8):
        found = asked(agent(middleware, *turns, tools=[of_user]), user=SecretStr("ann"))
    assert found[-2].content == "#W1 of **********" and not events


@pytest.mark.parametrize("answer", [
    {"content": [{"type": "mcp_call", "name": "buy"}, {"type": "text", "text": "bought"}]},
    pytest.param({"content": "bought", "additional_kwargs": {"tool_outputs": [{"type": "code_interpreter_call"}]}},
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_calls_run_by_the_provider_discard_early_results(answer: dict[str, Any]) -> None:
    middleware, events = trained()
    graph = agent(middleware, AIMessage(**answer), asks("look", order="#W1"), AIMessage("done"))
    ask(graph, "t9", "look at #W1, please")
    assert [event.outcome for event in events if event.tool == "look"][:2] == ["start", "stale"]
    events.clear()
    quiet = agent(middleware, AIMessage([{"type": "text", "text": "wait"}]), *SCRIPT)
    ask(quiet, "t10", "look at #W1, please")
    assert "stale" not in {event.outcome for event in events}


def test_branches_have_their_own_turns_and_discard_each_others_results() -> None:
    middleware, events = trained()
    reading = agent(middleware, AIMessage("wait"), asks("look", order="#W1"), AIMessage("done"))
    writing = agent(middleware, asks("buy", order="#W1"), AIMessage("done"))

    def both(state: dict[str, Any]) -> dict[str, Any]:
        reading.invoke({"messages": [HumanMessage("look at #W1, please")]})
        writing.invoke({"messages": [HumanMessage("buy #W1")]})
        return {}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("both", both)
    graph.set_entry_point("both")
    ask(graph.compile(checkpointer=InMemorySaver()), "t9", "go")
    started = next(event for event in events if event.outcome == "start" and event.tool == "look")
    ended = next(event for event in events if event.tool == started.tool and event.outcome != "start")
    assert stock["#W1"] == 0 and ended.outcome == "stale"


# Tools of MCP servers: their functions take a runtime, which matters only where something learns of it. ---------------

SCHEMA = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}


@dataclass
class Callbacks:
    """As that of langchain-mcp-adapters."""

    on_progress: Any = None
    on_elicitation: Any = None


def adapted(module: str = "langchain_mcp_adapters.tools", schema: Any = SCHEMA, **options: Any) -> BaseTool:
    """A tool of the shape that langchain-mcp-adapters 0.3 makes; an interceptor or a callback gets its runtime."""
    tool_interceptors, callbacks = options.get("tool_interceptors"), options.get("callbacks")

    async def call_tool(
        runtime: Annotated[object | None, InjectedToolArg()] = None, **arguments: dict[str, Any]
    ) -> tuple[Any, Any]:
        for learns in (*(tool_interceptors or ()), callbacks and callbacks.on_progress):
            if learns is not None:
                learns(runtime)
        ran.append("call_tool")
        return [{"type": "text", "text": f"found {arguments}"}], {"structured_content": arguments}

    call_tool.__module__ = module
    return StructuredTool(
        name="look",
        description="From a server.",
        args_schema=schema,
        coroutine=call_tool,
        response_format="content_and_artifact",
    )


async def conversations(tool: BaseTool, *names: str) -> tuple[list[Any], list[ToolEvent]]:
    """What the last of several conversations says, in which the model calls the tool; and what started early."""
    middleware, events = opened(*names)
    for number in range(8):
        graph = agent(middleware, asks("look", order="#W1"), AIMessage("done"), tools=[tool])
        config: Any = {"configurable": {"thread_id": f"t{number}"}}
        found = await graph.ainvoke({"messages": [HumanMessage("look at #W1")]}, config)
    return shown(found["messages"]), events


@pytest.mark.parametrize("options", [{}, {"tool_interceptors": []}, {"callbacks": Callbacks()}])
async def test_a_listed_tool_of_a_server_starts_early(options: dict[str, Any]) -> None:
    plain, nothing = await conversations(adapted(**options), "none")
    early, events = await conversations(adapted(**options))
    assert early == plain and not nothing and "hit" in {event.outcome for event in events}


@pytest.mark.parametrize(
    "options",
    [
        {"tool_interceptors": [scopes.append]},
        {"callbacks": Callbacks(on_progress=scopes.append)},
        {"module": "another"},
        {
            "schema": {**SCHEMA, "properties": {**SCHEMA["properties"], "runtime": {}}},  # type: ignore[dict-item]
            "tool_interceptors": [scopes.append],
        },
    ],
)
async def test_a_tool_that_shares_its_runtime_does_not_start_early(options: dict[str, Any]) -> None:
    _, events = await conversations(adapted(**options))
    assert not events and len(ran) == 8
