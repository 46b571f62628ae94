"""Tools of a LangChain agent that start before the model calls them: the same messages, with fewer runs to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import ensure_config
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import InjectedState
from pydantic import SecretStr

from agentspec.langchain import AgentSpecMiddleware, EarlyTools
from agentspec.langchain.early_tools import blocks
from agentspec.protocol.headers import StepPolicy
from agentspec.step import report
from agentspec.step.report import observe
from agentspec.step.scope import current_labels, current_policy
from agentspec.tools import ToolEvent, ToolPolicy, ToolSpeculator
from agentspec.types import Labels

pytestmark = pytest.mark.anyio

ran: list[str] = []
scopes: list[tuple[Labels, StepPolicy]] = []
stock = {"#W1": 1, "#W2": 2}


@tool
def look(order: str, full: bool = False) -> dict[str, Any]:
    """Read an order."""
    ran.append("look")
    scopes.append((current_labels(), current_policy()))
    observe(None, None, 0.0)  # as a model that the tool asks
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
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("agentspec.tools.model.pays", lambda probability, *_: probability > 0.2)
    ran.clear()
    scopes.clear()
    stock.update({"#W1": 1, "#W2": 2})
    report().reset()
    yield
    report().reset()


class ScriptedModel(GenericFakeChatModel):
    disable_streaming: bool = True

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self


def asks(name: str, **arguments: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": f"call {name}", "type": "tool_call"}])


def agent(middleware: AgentSpecMiddleware, *script: AIMessage, tools: Any = (look, buy, peek), more: Any = ()) -> Any:
    model = ScriptedModel(messages=iter(script))
    return create_agent(model, list(tools), middleware=[middleware, *more], checkpointer=InMemorySaver(), name="shop")


def forgetful(middleware: AgentSpecMiddleware) -> Any:
    """An agent without a thread."""
    model = ScriptedModel(messages=iter(SCRIPT))
    return create_agent(model, [look, buy, peek], middleware=[middleware], name="shop")


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


def taught(*names: str, **options: Any) -> tuple[AgentSpecMiddleware, list[ToolEvent]]:
    middleware, events = opened(*names, **options)
    for number in range(8):
        session(middleware, number)
    events.clear()
    return middleware, events


def test_messages_are_those_without_early_starts() -> None:
    middleware, events = taught()
    early, plain = session(middleware, 8), session(AgentSpecMiddleware(), 9)
    assert shown(early) == shown(plain)
    assert [event.tool for event in events if event.outcome == "hit"]
    assert {event.tool for event in events} == {"look"} and ran.count("buy") == 10


async def test_only_tools_without_an_asynchronous_way_run_in_a_thread() -> None:
    @tool
    async def later(order: str) -> str:
        """Read an order."""
        return order

    class Own(BaseTool):
        name: str = "own"
        description: str = "Read an order."

        def _run(self) -> str:
            return "here"

    class Both(Own):
        async def _arun(self) -> str:
            return "there"

    assert [blocks(one) for one in (look, later, Own(), Both())] == [True, False, True, False]


def test_agents_without_a_thread_start_tools_too() -> None:
    middleware, events = opened()
    for _ in range(8):
        stock.update({"#W1": 1, "#W2": 2})
        forgetful(middleware).invoke({"messages": [HumanMessage("look at #W1, please")]})
    assert any(event.outcome == "hit" for event in events)
    assert len({event.session for event in events}) > 1


@pytest.mark.parametrize("policy", [pytest.param(StepPolicy(), marks=pytest.mark.slow), StepPolicy(priority=3)])
def test_an_early_run_has_the_labels_and_the_policy_of_its_call(policy: StepPolicy) -> None:
    middleware, events = taught(policy=policy, policies={"tools": StepPolicy(model="other")})
    scopes.clear()
    report().reset()
    session(middleware, 8)
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


def test_a_tool_that_other_middleware_puts_in_place_of_another_runs() -> None:
    class Replacing(AgentMiddleware[Any, Any, Any]):
        def wrap_tool_call(self, request: Any, handler: Any) -> Any:
            return handler(request.override(tool=other) if request.tool is look else request)

    other = look.model_copy(update={"func": lambda order, full=False: f"another {order}"})
    middleware, events = taught()
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

    middleware, events = taught()
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

    middleware, events = taught()
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

    middleware, _ = taught()
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
    told = graph.stream({"messages": [HumanMessage("look at #W1, please")]}, config, stream_mode="messages")
    words = [message.content for message, _ in told if isinstance(message, AIMessage)]
    assert [event.outcome for event in events] == ["start", "hit"] * 2
    assert words == ["", "", "", "done"], "the words of the agent itself alone"


def test_names_alone_start_tools_early() -> None:
    for names, started in ([], False), (["look"], True):
        middleware = AgentSpecMiddleware(early_tools=names)
        for number in range(8):
            session(middleware, number)
        assert (ran.count("look") > 16) == started
        ran.clear()


def test_a_step_replayed_from_a_checkpoint_starts_nothing() -> None:
    middleware, events = taught()
    config: Any = {"configurable": {"thread_id": "again"}}
    first = agent(middleware, *SCRIPT, *SCRIPT)
    first.invoke({"messages": [HumanMessage("look at #W1, please")]}, config)
    assert events
    before = next(state for state in first.get_state_history(config) if state.next == ("model",) and state.values)
    events.clear()
    first.invoke(None, before.config)
    assert "start" not in {event.outcome for event in events}


def test_tools_that_take_state_never_start_early() -> None:
    middleware, events = opened("look", "peek")
    for number in range(6):
        ask(agent(middleware, asks("peek", order="#W1"), AIMessage("done")), f"t{number}", "peek at #W1")
    assert ran == ["peek"] * 6 and not events


@pytest.mark.parametrize("wanted", ["needs_approval", "requires_approval"])
def test_a_tool_that_needs_approval_never_starts_early(wanted: str) -> None:
    speculator = ToolSpeculator(ToolPolicy(["look"]))
    early = EarlyTools(speculator)
    plain, asked = (look.model_copy(update={"metadata": {wanted: needs}}) for needs in (False, True))
    assert [speculator.policy.may_run_early(early.described(tool)) for tool in (plain, asked)] == [True, False]


def asked(graph: Any, **configurable: Any) -> list[BaseMessage]:
    config: Any = {"configurable": {"thread_id": "t", **configurable}}
    return list(graph.invoke({"messages": [HumanMessage("look at #W1, please")]}, config)["messages"])


@tool
def whose(order: str) -> str:
    """Read an order for the user of the run."""
    ran.append("whose")
    return f"{order} of {ensure_config().get('configurable', {}).get('user', 'nobody')}"


def test_an_early_run_knows_what_the_caller_configured_and_no_other_caller_gets_its_result() -> None:
    middleware, events = opened("whose")
    turns = [asks("whose", order="#W1"), AIMessage("done")]
    for _ in range(8):
        found = asked(agent(middleware, *turns, tools=[whose]), user="ann")
    assert found[-2].content == "#W1 of ann" and any(event.outcome == "hit" for event in events)
    events.clear()
    late = agent(middleware, AIMessage("hello"), *turns, tools=[whose])
    asked(late, user="ann")
    assert asked(late, user="bob")[-2].content == "#W1 of bob"
    assert "start" in {event.outcome for event in events}


def test_nothing_starts_where_two_callers_may_look_the_same() -> None:
    middleware, events = opened("whose")
    turns = [asks("whose", order="#W1"), AIMessage("done")]
    for _ in range(8):
        found = asked(agent(middleware, *turns, tools=[whose]), user=SecretStr("ann"))
    assert found[-2].content == "#W1 of **********" and not events


@pytest.mark.parametrize("answer", [
    {"content": [{"type": "mcp_call", "name": "buy"}, {"type": "text", "text": "bought"}]},
    pytest.param({"content": "bought", "additional_kwargs": {"tool_outputs": [{"type": "code_interpreter_call"}]}},
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_what_the_provider_ran_voids_what_was_read_before(answer: dict[str, Any]) -> None:
    middleware, events = taught()
    graph = agent(middleware, AIMessage(**answer), asks("look", order="#W1"), AIMessage("done"))
    ask(graph, "t9", "look at #W1, please")
    assert [event.outcome for event in events if event.tool == "look"][:2] == ["start", "stale"]
    events.clear()
    quiet = agent(middleware, AIMessage([{"type": "text", "text": "wait"}]), *SCRIPT)
    ask(quiet, "t10", "look at #W1, please")
    assert "stale" not in {event.outcome for event in events}


def test_branches_of_a_session_have_turns_of_their_own_and_void_each_others_results() -> None:
    middleware, events = taught()
    assert middleware.early_tools is not None
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
    sessions = [
        one.caller for one in middleware.early_tools._speculator._sessions.values() if one.caller.session == "t9"
    ]
    assert len({caller.branch for caller in sessions}) == 2
