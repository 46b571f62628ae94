"""`/v1/responses` of local models, through the official client over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentspec.backends.base import Capabilities
from agentspec.errors import EngineError
from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest, Labels, Speculation, Usage

# Shared: a client of its own costs more than a request.
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
MODEL = "fake"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
CALLS = [
    {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}},
    {"index": 0, "function": {"arguments": '{"at": 1}'}},
    {"index": 1, "id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
]
DONE = Speculation(drafted=6, accepted=4, steps=3, estimated_seconds_saved=0.5)


def script(request: GenerateRequest) -> Any:
    asked = str((request.messages or [{}])[-1].get("content"))
    if asked == "call":
        return Answer("", extra={"tool_calls": CALLS}, finish_reason="tool_calls")
    if asked == "think":
        thought = {"reasoning": "hm well", "reasoning_content": "hm well"}
        return Answer("", extra=thought, usage=Usage(5, 3, cached_tokens=2, reasoning_tokens=2))
    if asked == "breaks":
        return Answer("one two three", error=EngineError("the engine broke"), error_after=2)
    return Answer("brave new wörld", speculation=DONE)


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend(script, capabilities=Capabilities(logprobs=True, context_length=200))


@pytest.fixture(scope="module")
def running(shared_gateway: Any, backend: FakeBackend) -> Any:
    return shared_gateway({MODEL: backend})


@pytest.fixture(scope="module")
def client(running: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events_of(running: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream as they came, each checked by the client's own type and for its name and number."""
    body = {"model": MODEL, "stream": True, **fields}
    wire = HTTP.post(f"{running.url}/v1/responses", json=body, timeout=60).text
    found = []
    for number, block in enumerate(wire.strip().split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        EVENT.validate_python(event)
        found.append(event)
    return found


def test_a_whole_answer(client: openai.OpenAI, backend: FakeBackend) -> None:
    answer = client.responses.create(model=MODEL, input="hi", instructions="be brief", metadata={"a": "b"}, user="u")
    Response.model_validate(answer.to_dict(), strict=False)
    assert answer.output_text == "brave new wörld" and answer.status == "completed" and answer.id.startswith("resp_")
    assert answer.usage and (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (
        3,
        3,
        6,
    )
    assert answer.instructions == "be brief" and answer.metadata == {"a": "b"} and answer.model == MODEL
    assert answer.to_dict()["speculation"] == {"drafted": 6, "accepted": 4, "steps": 3, "estimated_seconds_saved": 0.5}
    seen = backend.requests[-1]
    assert list(seen.messages or ()) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_a_streamed_text(running: Any) -> None:
    events = events_of(running, input="hi")
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 3,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    whole = events[-1]["response"]
    assert text == "brave new wörld" == whole["output"][0]["content"][0]["text"]
    assert events[-2]["item"] == whole["output"][0] and whole["usage"]["output_tokens"] == 3
    assert {event["response"]["id"] for event in events if "response" in event} == {whole["id"]}


def test_streamed_calls_and_thoughts(running: Any) -> None:
    events = events_of(running, input="call", tools=[TOOL])
    first, second = events[-1]["response"]["output"]
    assert (first["call_id"], first["name"], first["arguments"]) == ("c1", "look", '{"at": 1}')
    assert (second["call_id"], second["arguments"]) == ("c2", "{}")
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [event["arguments"] for event in done] == ['{"at": 1}', "{}"]
    events = events_of(running, input="think")
    assert [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"] == ["hm well"]
    whole = events[-1]["response"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm well"}]
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 2


def test_the_clients_stream_helper(client: openai.OpenAI) -> None:
    for asked, kind in (("hi", "message"), ("call", "function_call"), ("think", "reasoning")):
        with client.responses.stream(model=MODEL, input=asked, tools=[TOOL]) as stream:
            assert [event.type for event in stream][-1] == "response.completed"
            assert stream.get_final_response().output[0].type == kind


def test_an_answer_that_breaks_fails(client: openai.OpenAI, running: Any) -> None:
    events = events_of(running, input="breaks")
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert running.metric("agentspec_requests_total", route="/v1/responses", model=MODEL, outcome="server_error") == 1
    with pytest.raises(openai.InternalServerError, match="the engine broke"):
        client.responses.create(model=MODEL, input="breaks")


def test_what_the_backend_is_asked(client: openai.OpenAI, backend: FakeBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    client.responses.create(
        model=MODEL,
        input="hi",
        text=form,
        tools=[TOOL],
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        reasoning={"effort": "none", "summary": "auto"},
        extra_body={"seed": 5},
        extra_headers={"x-agentspec-session": "s1", "x-agentspec-store": "off"},
    )
    seen = backend.requests[-1]
    assert seen.sampling.structured_outputs and seen.sampling.structured_outputs.json == schema
    assert (seen.tool_choice, seen.parallel_tool_calls, seen.labels) == ("look", False, Labels("s1"))
    sampling = seen.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.9, 7, 5)
    assert seen.template_arguments["enable_thinking"] is False and not seen.store


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
    ({"input": []}, "input"),
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": "word " * 201}, "input"),
    ({"messages": [{}]}, "messages"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"metadata": {str(number): "a" for number in range(17)}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "tool_search", "execution": "client"}]}, "tools[0].type"),
    ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"n": 2}, "n"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_refused(running: Any, fields: dict[str, Any], param: str) -> None:
    response = HTTP.post(f"{running.url}/v1/responses", json={"model": MODEL, "input": "hi", **fields})
    assert response.status_code == (404 if param == "previous_response_id" else 400), response.text
    assert response.json()["error"]["param"] == param
