from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Any, TypedDict, cast

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumps
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from pydantic import SecretStr, ValidationError

from agentspec.errors import (
    ConfigurationError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RequestTimeoutError,
    UpstreamError,
    UpstreamStatusError,
)
from agentspec.langchain import ChatAgentSpec
from agentspec.langgraph import label
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.step import report, step, workflow
from agentspec.step.report import StepRow
from agentspec.testing import Answer, FakeBackend, Scripted
from agentspec.types import Labels, Speculation, StructuredOutputs, Usage

pytestmark = pytest.mark.anyio
SPECULATION = Speculation(drafted=4, accepted=3, steps=2, estimated_seconds_saved=0.25)


@pytest.fixture(autouse=True)
def fresh_report() -> Iterator[None]:
    report().reset()
    yield
    report().reset()


def chat(*script: Scripted, **options: Any) -> tuple[ChatAgentSpec, FakeBackend]:
    """A model on a fake backend that is no local engine, so that it takes every option."""
    fake = FakeBackend(*script)
    return ChatAgentSpec(model="fake", runtime=Runtime(backends={"fake": fake}), **options), fake


def chat_of(fake: FakeBackend) -> ChatAgentSpec:
    return ChatAgentSpec(model="fake", runtime=Runtime(backends={"fake": fake}))


def row(step: str | None, workflow: str | None = None) -> StepRow:
    return next(row for row in report() if (row.workflow, row.step) == (workflow, step))


def test_every_sampling_option_reaches_the_backend() -> None:
    model, fake = chat(temperature=0.5, top_p=0.9, seed=7, stop=["\n"], logit_bias={3: -1.0}, top_logprobs=2)
    model.invoke("hi", stop=["END"], temperature=0.0, max_tokens=5, min_p=0.1, top_k=4, repetition_penalty=1.1)
    got = fake.requests[0].sampling
    assert (got.temperature, got.top_p, got.seed, got.stop) == (0.0, 0.9, 7, ("END",))
    assert (got.max_tokens, got.min_p, got.top_k, got.repetition_penalty) == (5, 0.1, 4, 1.1)
    assert got.logit_bias == {3: -1.0} and (got.logprobs, got.top_logprobs) == (True, 2)


def test_request_switches() -> None:
    model, fake = chat(prediction="abc", session="s", speculation=False, store=False)
    model.invoke("hi")
    model.bind(speculation=True, session="t").invoke("hi", prediction={"type": "content", "content": "xyz"})
    first, second = fake.requests
    assert (first.prediction, first.labels.session, first.speculation, first.store) == ("abc", "s", False, False)
    assert (second.prediction, second.labels.session, second.speculation) == ("xyz", "t", True)


def test_unknown_and_wrong_options_are_refused() -> None:
    with pytest.raises(ValidationError):
        ChatAgentSpec(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="must begin with http"):
        ChatAgentSpec(base_url="127.0.0.1:8700/v1")
    model, _ = chat()
    wrong: list[dict[str, Any]] = [{"temperature": 9}, {"temperature": "hot"}, {"timeout": 3}, {"api_key": "k"}]
    for options in wrong:
        with pytest.raises(InvalidRequestError):
            model.invoke("hi", **options)
    with pytest.raises(ModelNotFoundError):
        model.invoke("hi", model="nobody")


@pytest.mark.parametrize(
    "option", [{"tools": [{"type": "function"}]}, {"response_format": {}}, {"n": 0}, {"best_of": 2}, {"functions": [1]}]
)
def test_the_local_engine_refuses_what_it_cannot_do(option: dict[str, Any]) -> None:
    model = ChatAgentSpec(runtime=Runtime(Settings(), backends={"local": FakeBackend()}))
    with pytest.raises(InvalidRequestError) as caught:
        model.invoke("hi", **option)
    assert str(caught.value.param).partition(".")[0].partition("[")[0] in option
    assert model.invoke("hi", user="me", n=1).content == "ok"


def test_secrets_stay_masked() -> None:
    model = ChatAgentSpec(base_url="http://127.0.0.1:1/v1", api_key=SecretStr("very-secret"), max_retries=0)
    with pytest.raises(UpstreamError) as caught:
        model.invoke("hi")
    shown = [repr(model), str(model), dumps(model), str(model._identifying_params), str(caught.value)]
    assert not any("very-secret" in text for text in shown)
    assert model.lc_secrets == {"api_key": "AGENTSPEC_API_KEY"}


def test_tracing_names_the_model() -> None:
    params = ChatAgentSpec(model="m", temperature=0.5)._get_ls_params(stop=["x"])
    assert (params.get("ls_provider"), params.get("ls_model_name")) == ("agentspec", "m")
    assert params.get("ls_temperature") == 0.5 and params.get("ls_stop") == ["x"]
    assert ChatAgentSpec(model="m")._get_ls_params(model="other").get("ls_model_name") == "other"


# Failures ------------------------------------------------------------------------------------------------------------


def test_retries_only_what_may_go_better() -> None:
    model, fake = chat(OverloadedError("busy", retry_after=0.01), "fine")
    assert model.invoke("hi").content == "fine" and len(fake.requests) == 2
    once, fake = chat(OverloadedError("busy"), "fine", max_retries=0)
    with pytest.raises(OverloadedError):
        once.invoke("hi")
    wrong, fake = chat(InvalidRequestError("no"), "fine")
    with pytest.raises(InvalidRequestError):
        wrong.invoke("hi")
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": {"a": 1}},
        {"logit_bias": [1]},
        {"stop_token_ids": 5},
        {"stop": 5},
        {"n": "2"},
        {"structured_outputs": {"regexp": "a"}},
        {"latency_target_ms_per_token": "20"},
        {"session": 5},
    ],
)
def test_an_option_of_the_wrong_type_is_refused(wrong: Any) -> None:
    model, fake = chat("fine")
    with pytest.raises(InvalidRequestError, match=r"wrong type|must be a (number|text)"):
        model.invoke("hi", **wrong)
    assert not fake.requests


def test_structured_outputs_may_be_given_as_vllms_clients_do() -> None:
    model, fake = chat("fine")
    model.invoke("hi", structured_outputs={"regex": "a+"})
    assert fake.requests[0].sampling.structured_outputs == StructuredOutputs(regex="a+")


@pytest.mark.parametrize("prediction", [{"type": "content", "content": [{"type": "text"}]}, {"type": "content"}, 5])
def test_a_prediction_without_a_text_is_refused(prediction: Any) -> None:
    model, fake = chat("fine")
    with pytest.raises(InvalidRequestError, match="prediction"):
        model.invoke("hi", prediction=prediction)
    assert not fake.requests


def test_no_retry_once_text_has_come() -> None:
    model, fake = chat(Answer(text="one two", error=OverloadedError("busy", retry_after=0.01), error_after=1), "fine")
    seen = []
    with pytest.raises(OverloadedError):
        for chunk in model.stream("hi"):
            seen.append(chunk.content)
    assert seen == ["one"] and len(fake.requests) == 1
    assert row(None).failed_calls == 1


def test_timeout() -> None:
    model, fake = chat(Answer(text="late", first_latency=30), timeout=0.05)
    with pytest.raises(RequestTimeoutError, match=r"0\.05"):
        model.invoke("hi")
    assert fake.active == 0


def test_leaving_a_stream_cancels_the_work() -> None:
    model, fake = chat(Answer(text="one two three", latency=0.01))
    with closing(cast(Any, model.stream("hi"))) as chunks:
        next(chunks)
    assert fake.active == 0 and len(fake.cancelled) == 1


async def test_cancelling_a_task_cancels_the_work() -> None:
    model, fake = chat(Answer(text="one", first_latency=30))
    task = asyncio.create_task(model.ainvoke("hi"))
    while not fake.active:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.active == 0


# Labels --------------------------------------------------------------------------------------------------------------


def test_a_step_labels_and_counts_its_calls() -> None:
    model, fake = chat(Answer(text="one two", speculation=SPECULATION))

    @step("plan", workflow="w", session="s", speculation=False)
    def plan() -> None:
        model.invoke("hi")
        list(model.stream("hi"))

    plan()
    assert [request.labels for request in fake.requests] == [Labels("s", "w", "plan")] * 2
    assert not fake.requests[0].speculation
    got = row("plan", "w")
    assert (got.runs, got.calls, got.completion_tokens) == (1, 2, 4) and got.model_seconds > 0


def test_langchains_cache_tells_the_models_of_steps_apart() -> None:
    backends = {"small": FakeBackend("from small"), "big": FakeBackend("from big")}
    model = ChatAgentSpec(model="small", runtime=Runtime(backends=backends), cache=InMemoryCache())

    @step("plan", model="big")
    def plan() -> str:
        return model.invoke("hi").text

    assert [plan(), model.invoke("hi").text, plan()] == ["from big", "from small", "from big"]
    assert [len(fake.requests) for fake in backends.values()] == [1, 1]


def test_a_step_says_how_its_calls_are_served(server: Any) -> None:
    model, fake = chat("ok", latency_target_ms_per_token=7)

    @step("plan", priority=3, store=False, latency_ms_per_token=50, deadline_s=60, speculation=False)
    def plan(model: ChatAgentSpec, **options: Any) -> None:
        model.invoke("hi", **options)

    plan(model)
    plan(chat_of(fake))
    first, second = fake.requests
    assert (first.priority, first.store, first.speculation) == (3, False, False)
    assert (first.latency_target_ms_per_token, second.latency_target_ms_per_token) == (7, 50)
    assert first.deadline_s is not None and 0 < first.deadline_s <= 60
    step("far", strategy="specreason")(plan)(remote(server))
    sent = server.request_headers[-1]
    assert (sent["x-agentspec-priority"], sent["x-agentspec-strategy"]) == ("3", "specreason")
    assert sent["x-agentspec-latency-ms-per-token"] == "50" and "x-agentspec-deadline-s" in sent
    assert "priority" not in server.bodies[-1]


def test_a_strategy_that_the_runtime_lacks_is_refused() -> None:
    model, _ = chat("ok")
    with pytest.raises(InvalidRequestError) as raised:
        step("plan", strategy="specreason")(model.invoke)("hi")
    assert raised.value.param == "strategy"


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]


def graph_of(model: Any, *, name: str = "review") -> Any:
    @step("polish")
    async def polish(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def write(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(State)
    builder.add_node("write", write)
    builder.add_node("polish_node", polish)
    builder.add_edge(START, "write")
    builder.add_edge("write", "polish_node")
    builder.add_edge("polish_node", END)
    return builder.compile(name=name, checkpointer=InMemorySaver())


CONFIG: Any = {"configurable": {"thread_id": "thread-1"}}
ASKED: Any = {"messages": [("user", "hi")]}


async def test_langgraph_nodes_are_steps_and_threads_sessions() -> None:
    model, fake = chat("first", "second")
    final = await label(graph_of(model)).ainvoke(ASKED, CONFIG)
    assert [message.content for message in final["messages"]] == ["hi", "first", "second"]
    assert [request.labels for request in fake.requests] == [
        Labels("thread-1", "review", "write"),
        Labels("thread-1", None, "polish"),
    ]


# A remote endpoint ---------------------------------------------------------------------------------------------------


def remote(server: Any, **options: Any) -> ChatAgentSpec:
    return ChatAgentSpec(model="fast", base_url=server.base_url, api_key=SecretStr("k"), **options)


def test_remote_answers_with_reasoning_usage_and_speculation(server: Any) -> None:
    with workflow("größe"):
        answer = remote(server, session="s", temperature=0.0, prediction="p").invoke("hi", reasoning_effort="low")
    assert answer.content == "a plain answer to it"
    assert answer.additional_kwargs["reasoning_content"] == "let me think"
    assert {"type": "reasoning", "reasoning": "let me think"} in cast(Any, answer.content_blocks)
    assert cast(Any, answer.usage_metadata)["input_token_details"] == {"cache_read": 4}
    assert answer.response_metadata["speculation"]["drafted"] == 6
    (body,), (sent,) = server.bodies, server.request_headers
    assert (body["model"], body["temperature"], body["reasoning_effort"]) == ("fast", 0.0, "low")
    assert body["prediction"] == {"type": "content", "content": "p"}
    assert sent["authorization"] == "Bearer k" and sent["x-agentspec-session"] == "s"
    assert sent["x-agentspec-workflow"] == "gr%C3%B6%C3%9Fe"
    assert row(None, "größe").accepted == 3


def test_remote_statuses(server: Any) -> None:
    server.failures = [503, 429]
    assert remote(server).invoke("hi").content == "a plain answer to it"
    server.failures = [400]
    with pytest.raises(UpstreamStatusError, match="scripted"):
        remote(server).invoke("hi")
    assert len(server.bodies) == 4


async def test_through_a_real_gateway(gateway: tuple[str, FakeBackend]) -> None:
    address, backend = gateway
    model = ChatAgentSpec(model="fake", base_url=address, seed=3, top_k=5)

    @step("plan", workflow="größe", session="s", speculation=False)
    async def plan() -> list[str]:
        return [str(chunk.content) async for chunk in model.astream("hi")]

    with workflow("w", session="t"):
        answer = model.invoke("hi", stop=["behind"])
    assert "".join(await plan()) == "hello from behind"
    assert answer.content == "hello from " and answer.response_metadata["speculation"]["drafted"] == 5
    first, second = backend.requests
    assert (first.labels, first.speculation) == (Labels("t", "w", None), True)
    assert (second.labels, second.speculation) == (Labels("s", "größe", "plan"), False)
    assert (second.sampling.seed, second.sampling.top_k) == (3, 5)
    assert (row(None, "w").accepted, row("plan", "größe").completion_tokens) == (4, 3)


@tool
def lookup(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def test_unknown_tool_choice_and_method() -> None:
    model, _ = chat()
    with pytest.raises(InvalidRequestError, match="nobody"):
        model.bind_tools([lookup], tool_choice="nobody")
    with pytest.raises(InvalidRequestError, match="magic"):
        model.with_structured_output({}, method="magic")  # type: ignore[arg-type]


def test_answer_metadata_and_usage() -> None:
    model, _ = chat(Answer(text="hello you", speculation=SPECULATION, usage=Usage(9, 2, 4, 1, 0)))
    answer = model.invoke("hi there")
    assert answer.content == "hello you"
    assert answer.usage_metadata == {
        "input_tokens": 9,
        "output_tokens": 2,
        "total_tokens": 11,
        "input_token_details": {"cache_read": 4},
        "output_token_details": {"accepted_prediction": 1, "rejected_prediction": 0},
    }
    assert answer.response_metadata["model_name"] == "fake"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["speculation"]["accepted"] == 3
