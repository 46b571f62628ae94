"""Tools of a LangChain agent start once their names have streamed, whatever chat model streams them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, message_chunk_to_message
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import Field

from agentspec.langchain import AgentSpecMiddleware, ChatAgentSpec, EarlyTools
from agentspec.langchain.name_listener import listening
from agentspec.tools import AuditEvent, ToolCall, ToolPolicy, ToolSpeculator
from agentspec.tools.prediction.model import CallForecast, CallModel, CallPrediction
from agentspec.tools.prediction.observation import NAMED

pytestmark = pytest.mark.anyio

ran = threading.Event()
runs: list[str] = []


@tool
def look(order: str) -> str:
    """Read an order."""
    runs.append("look")
    ran.set()
    return f"{order} is here"


@tool
def buy(order: str) -> str:
    """Buy an order."""
    runs.append("buy")
    return "bought"


@pytest.fixture(autouse=True)
def foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is expected before a turn, and after a name the call of that tool that the scripts have."""

    def named(*told: Any) -> list[CallPrediction]:
        return [CallPrediction(ToolCall(told[-1], {"order": "#W1"}), 0.9, 0.9, NAMED)]

    monkeypatch.setattr(CallModel, "predict", lambda *_: CallForecast((), ()))
    monkeypatch.setattr(CallModel, "predict_named", named)
    monkeypatch.setattr("agentspec.tools.learned.worthwhile", lambda found, *_: list(found))
    ran.clear()
    runs.clear()


class ScriptedModel(BaseChatModel):
    """Calls a tool for a user, and thanks for what it returns. A stream waits behind the name if `waits` is set, until
    the tool runs.
    """

    calls: str = "look"
    waits: bool = False
    streaming: bool = False
    streamed: list[bool] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _chunks(self, messages: list[BaseMessage]) -> Iterator[AIMessageChunk]:
        if messages[-1].type != "human":
            yield AIMessageChunk(content="thanks", id="answer")
            return
        yield AIMessageChunk(content="", id="asked", tool_call_chunks=[_piece(self.calls, "")])
        if self.waits:
            assert ran.wait(30), "the tool did not start by its name"
        arguments = json.dumps({"order": "#W1"})
        for piece in (arguments[:5], arguments[5:]):
            yield AIMessageChunk(content="", id="asked", tool_call_chunks=[_piece(None, piece)])

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self.streamed.append(False)
        first, *others = self.model_copy(update={"waits": False})._chunks(messages)
        message = message_chunk_to_message(first + others if others else first)
        assert isinstance(message, AIMessage)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(self, messages: list[BaseMessage], *_: Any, **__: Any) -> Iterator[ChatGenerationChunk]:
        self.streamed.append(True)
        for chunk in self._chunks(messages):
            yield ChatGenerationChunk(message=chunk)


def _piece(name: str | None, args: str) -> Any:
    return tool_call_chunk(name=name, args=args, id="1" if name else None, index=0)


def opened(model: BaseChatModel, **options: Any) -> tuple[Any, list[AuditEvent]]:
    events: list[AuditEvent] = []
    early = EarlyTools(ToolSpeculator(ToolPolicy(["look"]), on_event=events.append), **options)
    middleware = AgentSpecMiddleware(early_tools=early)
    return create_agent(model, [look, buy], middleware=[middleware], checkpointer=InMemorySaver()), events


ASKED: Any = {"messages": [HumanMessage("look at #W1", id="u")]}
THREAD: Any = {"configurable": {"thread_id": "t"}}


def shown(messages: list[BaseMessage]) -> list[Any]:
    """The messages without the ids that LangGraph invents."""
    return [{**message.model_dump(), "id": None} for message in messages]


def outcomes(events: list[AuditEvent]) -> list[str]:
    return [event.outcome for event in events]


def usual() -> list[Any]:
    """The messages without early starts and without streams."""
    plain = create_agent(ScriptedModel(), [look, buy])
    found = shown(plain.invoke(ASKED)["messages"])
    ran.clear()
    runs.clear()
    return found


@pytest.mark.parametrize("way", ["its own option", "ours"])
def test_a_tool_starts_while_its_arguments_are_written(way: str) -> None:
    want = usual()
    own = way == "its own option"
    model = ScriptedModel(streaming=True, waits=True) if own else ScriptedModel(waits=True)
    graph, events = opened(model, stream=not own)
    assert shown(graph.invoke(ASKED, THREAD)["messages"]) == want
    assert outcomes(events) == ["launch", "hit"] and runs == ["look"]


async def test_and_in_an_event_loop() -> None:
    want = usual()
    graph, events = opened(ScriptedModel(streaming=True, waits=True))
    assert shown((await graph.ainvoke(ASKED, THREAD))["messages"]) == want
    assert outcomes(events) == ["launch", "hit"] and runs == ["look"]


async def test_whoever_streams_the_graph_makes_names_heard() -> None:
    graph, events = opened(ScriptedModel(waits=True))
    for _ in graph.stream(ASKED, THREAD, stream_mode="messages"):
        pass
    async for _ in graph.astream_events(ASKED, {"configurable": {"thread_id": "u"}}, version="v2"):
        pass
    assert outcomes(events) == ["launch", "hit"] * 2


def test_a_model_is_not_made_to_stream_unasked() -> None:
    model = ScriptedModel()
    graph, events = opened(model)
    assert shown(graph.invoke(ASKED, THREAD)["messages"]) == usual()
    assert events == [] and model.streamed == [False, False]


def test_a_model_that_must_not_stream_does_not() -> None:
    model = ScriptedModel(disable_streaming=True)
    graph, events = opened(model, stream=True)
    graph.invoke(ASKED, THREAD)
    assert events == [] and model.streamed == [False, False]


def test_a_writing_tool_never_starts_by_its_name() -> None:
    graph, events = opened(ScriptedModel(calls="buy", streaming=True))
    graph.invoke(ASKED, THREAD)
    assert events == [] and runs == ["buy"]


def test_a_replayed_step_starts_nothing() -> None:
    graph, events = opened(ScriptedModel(streaming=True))
    graph.invoke(ASKED, THREAD)
    first = next(
        one for one in graph.get_state_history(THREAD) if one.next == ("model",) and len(one.values["messages"]) == 1
    )
    events.clear()
    graph.invoke(None, first.config)
    assert events == []


class Told(BaseCallbackHandler):
    """Counts the tokens that callbacks of the user hear."""

    count = 0

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        self.count += 1


@pytest.mark.parametrize("streaming", [False, True])
async def test_our_chat_model_tells_names_without_streaming_to_others(server: Any, streaming: bool) -> None:
    def names(model: ChatAgentSpec, told: Told) -> tuple[list[str], AIMessage]:
        heard: list[str] = []
        with listening(heard.append):
            return heard, model.bind_tools([look, buy]).invoke("look at 'it'", {"callbacks": [told]})

    model, told = ChatAgentSpec(model="m", base_url=server.base_url, streaming=streaming), Told()
    heard, answer = names(model, told)
    assert heard == ["look"] == [call["name"] for call in answer.tool_calls] and (told.count > 0) is streaming
    plain = model.bind_tools([look, buy]).invoke("look at 'it'")
    assert {**answer.model_dump(), "id": None} == {**plain.model_dump(), "id": None}
    heard = []
    with listening(heard.append):
        await model.bind_tools([look, buy]).ainvoke("look at 'it'")
    with listening(None):
        await model.bind_tools([look, buy]).ainvoke("look at 'it'")
    assert heard == ["look"]


def test_events_of_the_newer_stream_are_heard() -> None:
    heard: list[str] = []
    with listening(heard.append):
        for _ in ScriptedModel().stream_events("look", version="v3"):
            pass
    assert heard == ["look"]
