"""Early starts change nothing in random graphs: branches, subgraphs, interrupts, resumes, replays."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, AgentState
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessageChunk, AnyMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from agentspec.langchain import AgentSpecMiddleware, EarlyTools
from agentspec.tools import ToolEvent, ToolPolicy, ToolSpeculator

pytestmark = pytest.mark.usefixtures("likely_starts_pay")
READ_ONLY = ("read", "list_orders", "fragile")
BRANCHES = ("left", "middle", "right")
_ACTIONS = 4  # of the model in a branch
_ROUNDS = 2


class Failing(AgentMiddleware[AgentState[Any], Any, Any]):
    """Shows a tool's error to the model."""

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        try:
            return handler(request)
        except ValueError as error:
            call = request.tool_call
            return ToolMessage(f"error: {error}", tool_call_id=call["id"], name=call["name"])


class World:
    """A shop's orders, and how often each tool ran."""

    def __init__(self) -> None:
        self.values = {f"A{number}": number for number in range(4)}
        self.ran: list[str] = []

    @property
    def tools(self) -> list[BaseTool]:
        functions: list[Callable[..., Any]] = [self.read, self.list_orders, self.fragile, self.write, self.approved]
        return [StructuredTool.from_function(one, description=one.__name__) for one in functions]

    def read(self, id: str, detail: bool = False) -> dict[str, Any]:
        self.ran.append("read")
        return {"id": id, "value": self.values.get(id), "more": detail}

    def list_orders(self) -> list[str]:
        self.ran.append("list_orders")
        return sorted(self.values)

    def fragile(self, id: str) -> str:
        self.ran.append("fragile")
        if self.values.get(id, 0) % 2:
            raise ValueError(f"{id} is odd")
        return f"{id} is {self.values[id]}"

    def write(self, id: str) -> str:
        self.ran.append("write")
        self.values[id] += 10
        return "done"

    def approved(self, id: str) -> str:
        said = interrupt(f"write {id}?")
        self.ran.append("approved")
        self.values[id] += 100
        return f"done, {said}"


class Decided(BaseChatModel):
    """Calls tools by its seed and by what was said: mostly reads, which go on from the last results."""

    seed: int

    @property
    def _llm_type(self) -> str:
        return "decided"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> ChatResult:
        return generate_from_stream(self._stream(messages))

    def _stream(self, messages: Any, *_: Any, **__: Any) -> Iterator[ChatGenerationChunk]:
        calls = self._calls(messages)
        for at, (name, arguments) in enumerate(calls):
            whole: Any = {"id": f"call {len(messages)} {at}", "index": at}
            pieces: Any = ({"name": name, "args": ""}, {"name": None, "args": arguments})
            for piece in pieces:
                chunks: Any = [{**whole, **piece}]
                yield ChatGenerationChunk(message=AIMessageChunk(content="", tool_call_chunks=chunks))
        if not calls:
            yield ChatGenerationChunk(message=AIMessageChunk(content=f"done after {len(messages)}"))

    def _calls(self, messages: Sequence[AnyMessage]) -> list[tuple[str, str]]:
        dice = random.Random(f"{self.seed} {[(one.type, one.text) for one in messages]}")
        id = f'{{"id": "A{len(messages) % 4}"}}'
        if len(messages) > 2 * _ACTIONS:
            return []
        return dice.choice([
            *[[("read", id)]] * 4, *[[("write", id)]] * 2, [("read", id), ("fragile", id)], [("list_orders", "{}")],
            [("write", id), ("read", id)], [("approved", id)], [("fragile", id)], [],
        ])  # fmt: skip


def graph(seed: int, world: World, early: EarlyTools | None) -> Any:
    """Rounds in each of which some branches work, each an agent; what they said is looked through."""
    middleware = [Failing(), *([] if early is None else [AgentSpecMiddleware(early_tools=early)])]

    def plan(state: Any) -> Any:
        chosen = random.Random(seed + len(state["messages"])).sample(BRANCHES, k=3 if seed % 3 else 2)
        return Command(goto=[Send(name, {"messages": [HumanMessage(f"look at A1 for {name}")]}) for name in chosen])

    def gather(state: Any) -> Any:
        said = sum(isinstance(one, HumanMessage) and one.text.startswith("round") for one in state["messages"])
        note = f"round {said}" + (interrupt("go on?") if seed % 2 else "")
        return Command(update={"messages": [HumanMessage(note)]}, goto="plan" if said < _ROUNDS - 1 else "__end__")

    builder: Any = StateGraph(MessagesState)
    builder.add_node("plan", plan, destinations=BRANCHES)
    builder.add_node("gather", gather, destinations=("plan", "__end__"))
    for name in BRANCHES:
        builder.add_node(name, create_agent(Decided(seed=seed), world.tools, middleware=middleware, name=name))
        builder.add_edge(name, "gather")
    builder.add_edge(START, "plan")
    return builder.compile(checkpointer=InMemorySaver(), name="random")


def shown(messages: Sequence[AnyMessage]) -> list[Any]:
    return [(one.type, one.content, getattr(one, "tool_calls", None), one.name) for one in messages]


def played(
    seed: int, early: EarlyTools | None, events: Sequence[ToolEvent] = (), threads: Sequence[str] = ("one", "two")
) -> list[Any]:
    """What the threads of a graph say, each with what it interrupts for, and with a replay of its past."""
    world, found = World(), list[Any]()
    run = graph(seed, world, early).with_config(max_concurrency=1)  # so that a graph has one outcome

    def on(given: Any, config: Any) -> None:
        replays = given is None
        while True:
            launched = len(events)
            result = run.invoke(given, config)
            found.extend(shown(result["messages"]))
            if replays:
                found.append([event.outcome for event in events[launched:] if event.outcome == "start"])
                replays = False
            asked = result.get("__interrupt__")
            if not asked:
                return
            found.extend(str(one.value) for one in asked)
            given, config = Command(resume={one.id: "yes" for one in asked}), {"configurable": {"thread_id": thread}}

    for thread in threads:
        on({"messages": [HumanMessage("look at A0")]}, {"configurable": {"thread_id": thread}})
        past = [one for one in run.get_state_history({"configurable": {"thread_id": thread}}) if one.next == ("plan",)]
        on(None, random.Random(seed).choice(past).config)
    return [*found, world.values, [name for name in world.ran if name not in READ_ONLY]]


def trained(events: list[ToolEvent]) -> EarlyTools:
    speculator = ToolSpeculator(ToolPolicy(READ_ONLY), on_event=events.append)
    return EarlyTools(speculator, agent="any")


def test_a_graph_does_the_same_with_and_without_early_starts() -> None:
    events: list[ToolEvent] = []
    assert played(7, trained(events), events, ["one"]) == played(7, None, threads=["one"])
    assert {"hit", "stale"} <= {event.outcome for event in events}  # otherwise this would say little


@pytest.mark.slow
@settings(max_examples=3)
@given(st.integers(0, 2**32))
def test_random_graphs_do_the_same_with_and_without_early_starts(seed: int) -> None:
    events: list[ToolEvent] = []
    assert played(seed, trained(events), events) == played(seed, None)
    assert not {event.tool for event in events} - set(READ_ONLY)
