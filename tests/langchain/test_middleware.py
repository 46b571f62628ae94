"""`AgentSpecMiddleware` on agents of LangChain: who called, with every kind of chat model."""

from __future__ import annotations

import json
from typing import Any, cast

import httpx
import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send
from pydantic import SecretStr

from agentspec import StepPolicy
from agentspec.errors import ConfigurationError
from agentspec.langchain import AgentSpecMiddleware, ChatAgentSpec
from agentspec.langgraph import label
from agentspec.runtime import Runtime
from agentspec.step import report, step, workflow
from agentspec.testing import Answer, FakeBackend, Scripted
from agentspec.types import Labels

pytestmark = pytest.mark.anyio
THREAD: Any = {"configurable": {"thread_id": "t1"}}
HI: Any = {"messages": [HumanMessage("hi")]}


@pytest.fixture(autouse=True)
def fresh_report() -> None:
    report().reset()


class PlainModel(GenericFakeChatModel):
    """A chat model that knows nothing of agentspec, and refuses options it does not know."""

    def bind_tools(self, tools: Any, **options: Any) -> Any:
        assert set(options) <= {"tool_choice"}
        return self


def plain(*answers: AIMessage) -> PlainModel:
    return PlainModel(messages=iter(answers))


def calling(name: str, **arguments: Any) -> dict[str, Any]:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"tool_calls": [call]}


def own(*script: Scripted) -> tuple[ChatAgentSpec, FakeBackend]:
    fake = FakeBackend(*script)
    return ChatAgentSpec(model="fake", runtime=Runtime(backends={"fake": fake})), fake


def openai(server: Any, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="some", base_url=server.base_url, api_key=SecretStr("k"), streaming=True, stream_usage=True, **options
    )


def look(city: str) -> str:
    """Look a city up."""
    return f"{city} is sunny"


def rows() -> dict[tuple[str | None, str | None], Any]:
    return {(row.workflow, row.step): row for row in report()}


async def ask(agent: Any, asynchronous: bool, config: Any = THREAD) -> Any:
    return await agent.ainvoke(HI, config) if asynchronous else agent.invoke(HI, config)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_agents_calls_are_labelled_and_counted_once(asynchronous: bool) -> None:
    model, fake = own(Answer(text="", extra=calling("look", city="Rome")), "sunny")
    agent = create_agent(model, [look], middleware=[AgentSpecMiddleware()], name="weather")
    await ask(agent, asynchronous)
    assert [request.labels for request in fake.requests] == [Labels("t1", "weather", "model")] * 2
    assert [(key, row.calls) for key, row in rows().items()] == [(("weather", "model"), 2)]


async def test_calls_of_other_chat_models_are_counted_by_usage_or_failure() -> None:
    usage: Any = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    model = plain(AIMessage("sunny", usage_metadata=usage))
    agent: Any = create_agent(model, [look], middleware=[AgentSpecMiddleware(workflow="mine")])
    await agent.ainvoke(HI)
    with pytest.raises(RuntimeError):
        agent.invoke(HI)
    row = rows()["mine", "model"]
    assert (row.calls, row.prompt_tokens, row.completion_tokens, row.failed_calls) == (2, 7, 3, 1)


def test_headers_are_not_sent_to_a_vendor_or_when_switched_off_or_where_answers_are_cached(server: Any) -> None:
    sent: list[bool] = []

    def answered(request: httpx.Request) -> httpx.Response:
        sent.append("x-agentspec-step" in request.headers)
        message = {"role": "assistant", "content": "hi"}
        return httpx.Response(200, json={"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def sends(url: str | None = None, *, cache: Any = None, **options: Any) -> bool:
        client = httpx.Client(transport=httpx.MockTransport(answered))
        model = ChatOpenAI(model="some", base_url=url, api_key=SecretStr("k"), http_client=client, cache=cache)
        create_agent(model, [], middleware=[AgentSpecMiddleware(**options)]).invoke(HI)
        return sent.pop()

    ours = "http://gateway.test/v1"
    assert not sends() and sends(send_headers=True)
    assert sends(ours) and not sends(ours, send_headers=False) and not sends(ours, cache=InMemoryCache())
    set_llm_cache(InMemoryCache())
    try:
        assert not sends(ours) and sends(ours, cache=False)
    finally:
        set_llm_cache(None)


def test_steps_and_workflows_around_the_agent_come_first() -> None:
    model, fake = own("ok")
    agent = create_agent(model, [], middleware=[AgentSpecMiddleware()], name="weather")
    with workflow("trip", session="s"):
        agent.invoke(HI, THREAD)
        step("plan")(agent.invoke)(HI, THREAD)
    assert [request.labels for request in fake.requests] == [
        Labels("s", "trip", "weather"),
        Labels("s", "trip", "plan"),
    ]


async def test_agents_in_a_graph_are_its_steps() -> None:
    model, fake = own("ok")
    unnamed, named = [
        create_agent(model, [], middleware=[AgentSpecMiddleware()], name=name) for name in (None, "critic")
    ]
    builder = StateGraph(MessagesState)
    builder.add_node("draft", unnamed)
    builder.add_node("second", named)
    builder.add_edge(START, "draft")
    builder.add_edge("draft", "second")
    builder.add_edge("second", END)
    await ask(label(builder.compile(name="review", checkpointer=InMemorySaver())), True)
    assert [request.labels for request in fake.requests] == [
        Labels("t1", "review", "draft"),
        Labels("t1", "review", "critic"),
    ]
    await ask(builder.compile(), True)
    assert [request.labels for request in fake.requests[2:]] == [
        Labels("t1", "draft", "model"),
        Labels("t1", "critic", "model"),
    ]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_branches_started_by_send_keep_their_labels_apart(asynchronous: bool) -> None:
    model, fake = own("ok")
    builder = StateGraph(MessagesState)
    for name in ("left", "right"):
        builder.add_node(name, create_agent(model, [], middleware=[AgentSpecMiddleware()], name=name))
    builder.add_conditional_edges(START, lambda state: [Send(name, state) for name in ("left", "right", "left")])
    await ask(label(cast(Any, builder.compile(name="fan"))), asynchronous)
    assert sorted(str(request.labels.step) for request in fake.requests) == ["left", "left", "right"]
    assert {request.labels.workflow for request in fake.requests} == {"fan"}
    assert sorted((str(key[1]), row.calls) for key, row in rows().items()) == [("left", 2), ("right", 1)]


# A policy for each step ----------------------------------------------------------------------------------------------


async def test_a_policy_is_the_agents_and_another_a_steps() -> None:
    model, fake = own("ok")
    middleware = AgentSpecMiddleware(
        policy=StepPolicy(priority=2, store=False, deadline_s=40),
        policies={"critic": StepPolicy(priority=5, speculation=False)},
    )
    for name in ("writer", "critic"):
        agent = create_agent(model, [], middleware=[middleware], name=name)
        await ask(label(agent, "review"), True)
    asked = [(one.priority, one.store, one.speculation) for one in fake.requests]
    assert asked == [(2, False, True), (5, False, False)] and all(one.deadline_s for one in fake.requests)


def test_an_invalid_policy_is_refused_by_the_constructor() -> None:
    for given in ({"policy": {"store": False}}, {"policies": {"model": {"store": False}}}):
        with pytest.raises(ConfigurationError, match=r"write a policy as StepPolicy\(\.\.\.\)"):
            AgentSpecMiddleware(**cast(Any, given))


def test_the_policy_reaches_other_clients_as_headers_and_as_the_models_name(server: Any) -> None:
    policy = StepPolicy(model="small", priority=1, store=False)
    with workflow(deadline=60):
        create_agent(openai(server), [look], middleware=[AgentSpecMiddleware(policy=policy)]).invoke(HI)
    sent, body = server.request_headers[0], server.bodies[0]
    assert body["model"] == "small"
    assert (sent["x-agentspec-priority"], sent["x-agentspec-store"]) == ("1", "off")
    assert 0 < float(sent["x-agentspec-deadline-s"]) <= 60


# Through a real gateway ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_every_client_reaches_the_gateway_with_its_labels(
    gateway: tuple[str, FakeBackend], asynchronous: bool
) -> None:
    url, fake = gateway
    models: list[Any] = [
        ChatOpenAI(model="fake", base_url=url, api_key=SecretStr("k")),
        ChatOpenAI(model="fake", base_url=url, api_key=SecretStr("k"), use_responses_api=True),
        ChatAnthropic(
            model_name="fake", base_url=url.removesuffix("/v1"), api_key=SecretStr("k"), timeout=60, stop=None
        ),
        ChatAgentSpec(model="fake", base_url=url),
    ]
    for model in models:
        policy = StepPolicy(priority=3, speculation=False)
        middleware = AgentSpecMiddleware(policy=policy)
        await ask(create_agent(model, [look], middleware=[middleware], name="weather"), asynchronous)
        request = fake.requests[-1]
        assert request.labels == Labels("t1", "weather", "model")
        assert (request.priority, request.speculation) == (3, False)
    row = rows()["weather", "model"]
    assert (row.calls, row.failed_calls) == (4, 0) and row.completion_tokens == 4 * 3
