"""`ChatAgentSpec`: what reaches a backend or an endpoint, and what an answer, or its failure, becomes in LangChain."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from pydantic import HttpUrl, SecretStr, ValidationError

from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.background import call_sync
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
from agentspec.protocol.tools import whole_arguments
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.step import report, step, workflow
from agentspec.testing import Answer, FakeBackend, Scripted
from agentspec.types import Delta, FinishReason, GenerateRequest, Speculation, StructuredOutputs, Usage

pytestmark = pytest.mark.anyio
SPECULATION = Speculation(drafted=4, accepted=3, steps=2, estimated_seconds_saved=0.25)


@pytest.fixture(autouse=True)
def fresh_report() -> None:
    report().reset()


def chat(*script: Scripted, **options: Any) -> tuple[ChatAgentSpec, FakeBackend]:
    """A model on a fake backend that is no local engine, so that it takes every option."""
    fake = FakeBackend(*script)
    return ChatAgentSpec(model="fake", runtime=Runtime(backends={"fake": fake}), **options), fake


def row(step: str | None, workflow: str | None = None) -> Any:
    return next(row for row in report() if (row.workflow, row.step) == (workflow, step))


# Options -------------------------------------------------------------------------------------------------------------


def test_every_option_reaches_the_backend() -> None:
    own = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["\n"], "logit_bias": {3: -1.0}, "top_logprobs": 2}
    model, fake = chat(**own, prediction="abc", session="s", speculation=False, store=False)
    form: Any = {"regex": "a+"}  # as vLLM's clients give it
    model.invoke("hi", stop=["END"], temperature=0.0, max_tokens=5, min_p=0.1, top_k=4, structured_outputs=form)
    predicted = {"type": "content", "content": "xyz"}
    model.bind(speculation=True, session="t").invoke("hi", prediction=predicted, stop_token_ids=(1, 2))
    first, second = fake.requests
    got = first.sampling
    assert (got.temperature, got.top_p, got.seed, got.stop) == (0.0, 0.9, 7, ("END",))
    assert (got.max_tokens, got.min_p, got.top_k, got.logit_bias) == (5, 0.1, 4, {3: -1.0})
    assert (got.logprobs, got.top_logprobs, got.structured_outputs) == (True, 2, StructuredOutputs(regex="a+"))
    assert (first.prediction, first.labels.session, first.speculation, first.store) == ("abc", "s", False, False)
    assert (second.prediction, second.labels.session, second.speculation) == ("xyz", "t", True)
    assert second.sampling.stop_token_ids == (1, 2)


WRONG: list[dict[str, Any]] = [
    {"temperature": 9}, {"temperature": "hot"}, {"timeout": 3}, {"api_key": "k"}, {"logit_bias": {"a": 1}},
    {"logit_bias": [1]}, {"stop_token_ids": 5}, {"stop": 5}, {"n": "2"}, {"structured_outputs": {"regexp": "a"}},
    {"session": 5}, {"prediction": {"type": "content"}}, {"prediction": 5},
    {"prediction": {"type": "content", "content": [{"type": "text"}]}},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_wrong_option_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    model, fake = chat("fine")
    with pytest.raises(InvalidRequestError) as caught:
        model.invoke("hi", **wrong)
    assert next(iter(wrong)) in str(caught.value) and not fake.requests


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValidationError):
        ChatAgentSpec(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="must begin with http"):
        ChatAgentSpec(base_url="127.0.0.1:8700/v1")
    model, _ = chat()
    with pytest.raises(ModelNotFoundError):
        model.invoke("hi", model="nobody")
    with pytest.raises(InvalidRequestError, match="magic"):
        model.with_structured_output({}, method="magic")  # type: ignore[arg-type]


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
    assert not any("very-secret" in text for text in (repr(model), str(model), dumps(model), str(caught.value)))
    assert model.lc_secrets == {"api_key": "AGENTSPEC_API_KEY"}


@tool
def lookup(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


NAMED = {"type": "function", "function": {"name": "lookup"}}


@pytest.mark.parametrize(
    ("choice", "sent"), [(True, "required"), ("any", "required"), ("none", "none"), ("lookup", NAMED), (NAMED, NAMED)]
)
def test_tool_choices_are_sent_in_openais_form(choice: Any, sent: Any) -> None:
    model, fake = chat("fine")
    model.bind_tools([lookup], tool_choice=choice).invoke("hi")
    assert fake.requests[0].extra["tool_choice"] == sent
    for absent in ("g", {"type": "function", "function": {"name": "g"}}):
        with pytest.raises(InvalidRequestError, match="'g'"):
            model.bind_tools([lookup], tool_choice=absent)


# Messages ------------------------------------------------------------------------------------------------------------


def sent(*messages: BaseMessage) -> list[Any]:
    """The messages that a backend gets."""
    model, fake = chat("fine")
    model.invoke([*messages])
    return list(fake.requests[0].messages or ())


def test_messages_as_openai_takes_them() -> None:
    call: Any = {"name": "f", "args": {"x": 1}, "id": "c1", "type": "tool_call"}
    broken: Any = {"name": "g", "args": '{"x": ', "id": "c2", "error": "no JSON", "type": "invalid_tool_call"}
    empty: Any = {"name": None, "args": None, "id": None, "error": "cut", "type": "invalid_tool_call"}
    thoughts: Any = [{"type": "reasoning", "reasoning": "hmm"}, {"type": "text", "text": "said"}]
    found = sent(
        SystemMessage("be brief"),
        HumanMessage([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        AIMessage("", tool_calls=[call], invalid_tool_calls=[broken]),
        ToolMessage("7", tool_call_id="c1"),
        AIMessage(content=thoughts),
        AIMessage("cut", invalid_tool_calls=[empty]),
    )
    assert [one["role"] for one in found] == ["system", "user", "assistant", "tool", "assistant", "assistant"]
    first, second = found[2]["tool_calls"]
    assert first["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert second == {"type": "function", "id": "c2", "function": {"name": "g", "arguments": '{"x": '}}
    assert found[3]["tool_call_id"] == "c1"
    assert found[4]["content"] == "said" and found[4]["reasoning_content"] == "hmm"
    assert found[5]["tool_calls"] == [{"type": "function", "id": None, "function": {"name": "", "arguments": ""}}]


class Scribe(FakeBackend):
    """Sends its deltas as they are, and the last one with how the answer ended."""

    def __init__(self, deltas: Sequence[Delta], finish: FinishReason = "stop") -> None:
        super().__init__()
        self.deltas, self.finish = deltas, finish

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:  # type: ignore[override]
        for delta in self.deltas:
            yield delta
        yield Delta(finish_reason=self.finish, usage=Usage(3, 9, reasoning_tokens=7))


def written(deltas: Sequence[Delta], finish: FinishReason = "stop") -> list[AIMessage]:
    """The answer whole, and as the sum of its chunks."""
    model = ChatAgentSpec(model="m", runtime=Runtime(backends={"m": Scribe(deltas, finish)}))
    first, *rest = model.stream("hi")
    return [model.invoke("hi"), cast(AIMessage, first + rest)]


@given(st.lists(st.text(max_size=5), min_size=1, max_size=6), st.sampled_from(["reasoning", "reasoning_content"]))
def test_chunks_add_up_to_the_text_and_the_thoughts(texts: list[str], name: str) -> None:
    said = "".join(texts)
    for whole in written([Delta(text=text, extra={name: text, "refusal": text}) for text in texts]):
        assert whole.content == said
        assert whole.additional_kwargs == ({"reasoning_content": said} if said else {}) | {"refusal": said}
        assert {"finish_reason": "stop", "model_name": "m", "model_provider": "agentspec"}.items() <= (
            whole.response_metadata.items()
        )
        assert cast(Any, whole.usage_metadata)["output_token_details"] == {"reasoning": 7}


JSON = st.text(alphabet='{}[]",:\\a1 \n', max_size=12) | st.dictionaries(st.text(max_size=3), st.integers()).map(
    json.dumps
)


@given(JSON, st.integers(0, 12), st.sampled_from(["tool_calls", "length", "cancelled", "content_filter"]))
def test_arguments_that_are_no_whole_object_make_an_invalid_call(said: str, at: int, finish: Any) -> None:
    head = {"index": 0, "id": "c", "function": {"name": "f", "arguments": said[:at]}}
    rest = {"index": 0, "function": {"arguments": said[at:]}}
    whole = whole_arguments(said, finish)
    for message in written([Delta(extra={"tool_calls": [one]}) for one in (head, rest)], finish):
        assert [call["args"] for call in message.tool_calls] == ([] if whole is None else [whole])
        assert len(message.invalid_tool_calls) == (whole is None)
        (back,) = sent(message)
        assert whole is not None or back["tool_calls"][0]["function"]["arguments"] == said


def test_whole_tool_calls_without_an_index() -> None:
    calls = [{"id": str(number), "function": {"name": f"f{number}", "arguments": "{}"}} for number in range(2)]
    for message in written([Delta(extra={"tool_calls": calls})], "tool_calls"):
        assert [call["name"] for call in message.tool_calls] == ["f0", "f1"]


def test_answer_metadata_usage_and_log_probabilities() -> None:
    answer = Answer(text="hello you\ud83d", speculation=SPECULATION, usage=Usage(9, 2, 4, 1, 0))
    model, _ = chat(answer, logprobs=True)
    found = model.invoke("hi there")
    assert found.usage_metadata == {
        "input_tokens": 9,
        "output_tokens": 2,
        "total_tokens": 11,
        "input_token_details": {"cache_read": 4},
        "output_token_details": {"accepted_prediction": 1, "rejected_prediction": 0},
    }
    assert found.response_metadata["speculation"]["accepted"] == 3
    last = found.response_metadata["logprobs"]["content"][-1]
    assert last["bytes"][-3:] == [0xED, 0xA0, 0xBD] and "token_id" in last  # a lone surrogate


# Failures ------------------------------------------------------------------------------------------------------------


def test_only_temporary_errors_are_retried() -> None:
    model, fake = chat(OverloadedError("busy", retry_after=0.01), "fine")
    assert model.invoke("hi").content == "fine" and len(fake.requests) == 2
    once, fake = chat(OverloadedError("busy"), "fine", max_retries=0)
    with pytest.raises(OverloadedError):
        once.invoke("hi")
    wrong, fake = chat(InvalidRequestError("no"), "fine")
    with pytest.raises(InvalidRequestError):
        wrong.invoke("hi")
    assert len(fake.requests) == 1


@pytest.mark.parametrize(("asked", "waits"), [(20.0, 20.0), (3600.0, 30.0)])
def test_a_retry_waits_as_long_as_the_server_asks_but_at_most_30_seconds(
    monkeypatch: pytest.MonkeyPatch, asked: float, waits: float
) -> None:
    model, _ = chat(OverloadedError("busy", retry_after=asked), "fine")
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("anyio.sleep", sleep)  # the call runs in a loop of its own, whose clock no test sets
    assert model.invoke("hi").content == "fine" and max(slept) == waits


def test_no_retry_once_text_has_come() -> None:
    model, fake = chat(Answer(text="one two", error=OverloadedError("busy", retry_after=0.01), error_after=1), "fine")
    seen = []
    with pytest.raises(OverloadedError):
        for chunk in model.stream("hi"):
            seen.append(chunk.content)
    assert seen == ["one"] and len(fake.requests) == 1
    assert row(None).failed_calls == 1


def test_a_timeout_cancels_the_call() -> None:
    model, fake = chat(Answer(text="late", first_latency=30), timeout=0.05)
    with pytest.raises(RequestTimeoutError, match=r"0\.05"):
        model.invoke("hi")
    assert fake.active == 0


def test_leaving_a_stream_cancels_the_work() -> None:
    model, fake = chat(Answer(text="one two three", latency=0.01))
    with closing(cast(Any, model.stream("hi"))) as chunks:
        next(chunks)
    assert fake.active == 0 and len(fake.cancelled) == 1


# Labels --------------------------------------------------------------------------------------------------------------


def test_langchains_cache_distinguishes_the_models_of_steps() -> None:
    backends = {"small": FakeBackend("from small"), "big": FakeBackend("from big")}
    model = ChatAgentSpec(model="small", runtime=Runtime(backends=backends), cache=InMemoryCache())

    @step("plan", model="big")
    def plan() -> str:
        return model.invoke("hi").text

    assert [plan(), model.invoke("hi").text, plan()] == ["from big", "from small", "from big"]
    assert [len(fake.requests) for fake in backends.values()] == [1, 1]


def test_the_policy_of_a_step_reaches_backend_and_endpoint(server: Any) -> None:
    model, fake = chat("ok")

    @step("plan", priority=3, store=False, deadline_s=60, speculation=False)
    def plan(model: ChatAgentSpec) -> None:
        model.invoke("hi")

    plan(model)
    (first,) = fake.requests
    assert (first.priority, first.store, first.speculation) == (3, False, False)
    assert first.deadline_s is not None and 0 < first.deadline_s <= 60
    step("far")(plan)(remote(server))
    got = server.request_headers[-1]
    assert got["x-agentspec-priority"] == "3" and "x-agentspec-deadline-s" in got
    assert "priority" not in server.bodies[-1]


class State(TypedDict):
    messages: Annotated[list[Any], add_messages]


def graph_of(name: str, **nodes: Any) -> Any:
    """A graph of these nodes, one after the other."""
    builder = StateGraph(State)
    for node, does in nodes.items():
        builder.add_node(node, does)
    before = START
    for node in nodes:
        builder.add_edge(before, node)
        before = node
    return builder.compile(name=name, checkpointer=InMemorySaver())


CONFIG: Any = {"configurable": {"thread_id": "thread-1"}}
ASKED: Any = {"messages": [("user", "hi")]}


async def test_langgraph_nodes_are_steps_threads_sessions_and_the_outermost_labelled_graph_the_workflow() -> None:
    model, fake = chat("ok")

    async def write(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    @step("polish")
    async def polish(state: State, config: RunnableConfig) -> dict[str, Any]:
        assert config["configurable"]["thread_id"] == "thread-1"
        return await write(state)

    graph = graph_of("review", write=write, polish_node=polish)
    outer = graph_of("outer", inner=label(graph_of("inner", draft=write)))
    for asked in (label(graph), label(graph, "mine"), graph, label(outer), outer):
        await asked.ainvoke(ASKED, CONFIG)
    named = [(one.labels.session, one.labels.workflow, one.labels.step) for one in fake.requests]
    assert named == [
        *(("thread-1", workflow, step) for workflow in ("review", "mine", None)
          for workflow, step in ((workflow, "write"), (None, "polish"))),
        ("thread-1", "outer", "draft"),
        ("thread-1", "inner", "draft"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("way", ["invoke", "stream", "batch"])
def test_thoughts_go_back_within_a_tool_loop_under_the_endpoints_name(name: str, way: str) -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = [Answer("", extra={name: text, "tool_calls": [call]}, finish_reason="tool_calls") for text in "ab"]
    fake = FakeBackend(*called, "done", "more")
    chat = ChatAgentSpec(model="m", runtime=Runtime(backends={"m": fake}))
    ask = {
        "invoke": chat.invoke,
        "stream": lambda said: (lambda first, *rest: first + rest)(*chat.stream(said)),
        "batch": lambda said: chat.batch([said])[0],
    }[way]
    said: list[Any] = [HumanMessage("hi")]
    for _ in called:
        said += [ask(said), ToolMessage("1", tool_call_id="c")]
    said += [ask(said), HumanMessage("again")]
    ask(said)
    sent = [[message.get(name) for message in request.messages or ()] for request in fake.requests]
    assert sent == [[None], [None, "a", None], [None, "a", None, "b", None], [None] * 7]


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
    (body,), (got,) = server.bodies, server.request_headers
    assert (body["model"], body["temperature"], body["reasoning_effort"]) == ("fast", 0.0, "low")
    assert body["prediction"] == {"type": "content", "content": "p"}
    assert got["authorization"] == "Bearer k" and got["x-agentspec-session"] == "s"
    assert got["x-agentspec-workflow"] == "gr%C3%B6%C3%9Fe"
    assert row(None, "größe").accepted == 3


def test_remote_statuses(server: Any) -> None:
    server.failures = [503, 429]
    assert remote(server).invoke("hi").content == "a plain answer to it"
    server.failures = [400]
    with pytest.raises(UpstreamStatusError, match="scripted"):
        remote(server).invoke("hi")
    assert len(server.bodies) == 4


# Tokens --------------------------------------------------------------------------------------------------------------


def test_a_local_model_counts_by_its_own_tokenizer(tiny_model: Path) -> None:
    runtime = Runtime(Settings(backends={"tiny": TorchSettings(model=str(tiny_model), max_active=1)}))
    try:
        model = ChatAgentSpec(model=str(tiny_model), runtime=runtime)
        assert len(model.get_token_ids("añb")) == model.get_num_tokens("añb") == 4  # its tokens are bytes
        assert model.get_token_ids("") == []
        messages: list[BaseMessage] = [SystemMessage("be brief"), HumanMessage("one two three"), HumanMessage("six")]
        newest = trim_messages(messages, max_tokens=30, token_counter=model)
        assert newest == messages[1:]
    finally:
        call_sync(runtime.aclose)


def test_the_tokenizer_of_a_gateway_or_of_one_server_of_a_pool_is_asked(gateway: tuple[str, FakeBackend]) -> None:
    url, fake = gateway
    up = OpenAISettings(base_urls=(HttpUrl(url),))
    pooled = Settings(backends={"up": up}, models={"pooled": ModelSettings(backend="up", upstream_model="fake")})
    runtime = Runtime(pooled)
    try:
        assert ChatAgentSpec(model="pooled", runtime=runtime).get_token_ids("one two") == fake.encode("one two")
    finally:
        call_sync(runtime.aclose)
    assert ChatAgentSpec(model="fake", base_url=url).get_token_ids("one two") == fake.encode("one two")


@pytest.mark.parametrize("status", [404, 405, 501])
def test_an_endpoint_without_a_tokenizer_says_what_to_set(server: Any, status: int) -> None:
    server.failures += [status]
    with pytest.raises(ConfigurationError, match=f"{status}.*custom_get_token_ids"):
        remote(server).get_num_tokens("one")
    assert remote(server, custom_get_token_ids=lambda text: [*text.encode()]).get_token_ids("ab") == [97, 98]
