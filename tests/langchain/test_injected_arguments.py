"""Tools of MCP servers: their functions take a runtime, which matters only where something learns of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import BaseTool, InjectedToolArg, StructuredTool

from agentspec.langchain import AgentSpecMiddleware, EarlyTools
from agentspec.tools import ToolCall, ToolEvent, ToolPolicy, ToolSpeculator
from agentspec.tools.model import CallForecast, CallModel, CallPrediction

pytestmark = pytest.mark.anyio
SCHEMA = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}

served: list[dict[str, Any]] = []
"""The arguments that the server got."""


@dataclass
class Callbacks:
    """As that of langchain-mcp-adapters."""

    on_progress: Any = None
    on_elicitation: Any = None


def adapted(
    name: str = "look",
    schema: dict[str, Any] = SCHEMA,
    *,
    tool_interceptors: Sequence[Any] | None = None,
    callbacks: Callbacks | None = None,
    read_only: bool = True,
) -> BaseTool:
    """A tool of the shape that langchain-mcp-adapters 0.3 makes."""

    async def call_tool(
        runtime: Annotated[object | None, InjectedToolArg()] = None, **arguments: dict[str, Any]
    ) -> tuple[Any, Any]:
        for told in (*(tool_interceptors or ()), callbacks and callbacks.on_progress):
            if told is not None:
                told(runtime)
        served.append(arguments)
        return [{"type": "text", "text": f"{name}: {arguments}"}], {"structured_content": arguments}

    call_tool.__module__ = "langchain_mcp_adapters.tools"
    return StructuredTool(
        name=name,
        description="From a server.",
        args_schema=schema,
        coroutine=call_tool,
        response_format="content_and_artifact",
        metadata={"title": None, "readOnlyHint": read_only, "destructiveHint": None},
    )


class Model(GenericFakeChatModel):
    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self


@pytest.fixture(autouse=True)
def predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`look` is predicted for every turn, if it may start early."""
    served.clear()
    found = CallForecast((CallPrediction(ToolCall("look", {"order": "#W1"}), 0.9, 0.9, 0),), ())
    nothing = CallForecast((), ())
    monkeypatch.setattr(CallModel, "predict", lambda _model, _history, tools: found if "look" in tools else nothing)
    monkeypatch.setattr("agentspec.tools.speculator.worthwhile", lambda found, *_: list(found))


async def converse(*tools: BaseTool, listed: Sequence[str] = ("look",)) -> tuple[list[Any], list[ToolEvent]]:
    """The tools' messages of an agent that calls `look`, and what started early."""
    events: list[ToolEvent] = []
    speculator = ToolSpeculator(ToolPolicy(listed), on_event=events.append)
    early = EarlyTools(speculator)
    call: Any = {"name": "look", "args": {"order": "#W1"}, "id": "c", "type": "tool_call"}
    model = Model(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("done")]))
    agent: Any = create_agent(model, list(tools), middleware=[AgentSpecMiddleware(early_tools=early)], name="agent")
    found = await agent.ainvoke({"messages": [HumanMessage("look at #W1", id="m")]})
    return [(one.content, getattr(one, "artifact", None)) for one in found["messages"]], events


async def test_a_listed_tool_of_a_server_starts_early_and_runs_once() -> None:
    plain, none = await converse(adapted(), listed=())
    assert not none and served == [{"order": "#W1"}]
    served.clear()
    early, events = await converse(adapted())
    assert early == plain and [event.outcome for event in events][:2] == ["start", "hit"]
    assert len(served) == 2  # that of the next turn is started too, for nothing


@pytest.mark.parametrize(
    "options", [{"tool_interceptors": [served.append]}, {"callbacks": Callbacks(on_progress=served.append)}]
)
async def test_a_tool_that_tells_others_does_not_start_early(options: dict[str, Any]) -> None:
    _, events = await converse(adapted(**options))
    assert not events


@pytest.mark.parametrize("options", [{"tool_interceptors": []}, {"callbacks": Callbacks()}])
def test_what_tells_nobody_changes_nothing(options: dict[str, Any]) -> None:
    early = EarlyTools(ToolSpeculator())
    assert not early.described(adapted(**options)).injected


def test_an_argument_of_the_name_of_the_runtime_is_not_the_models() -> None:
    schema = {"type": "object", "properties": {"runtime": {"type": "string"}}}
    early = EarlyTools(ToolSpeculator())
    assert early.described(adapted(schema=schema, tool_interceptors=[print])).injected


def test_a_function_that_is_not_known_may_do_anything() -> None:
    async def call_tool(runtime: Any = None, **arguments: Any) -> tuple[Any, Any]:
        return arguments, None

    early = EarlyTools(ToolSpeculator())
    tool = StructuredTool(name="look", description="", args_schema=SCHEMA, coroutine=call_tool)
    assert early.described(tool).injected
    call_tool.__module__ = "langchain_mcp_adapters.tools"
    assert early.described(tool).injected
