"""Requests that pass to an upstream, answers that pass back, and the counts in them."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import httpx
import openai
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Speculation

MODEL = "up"
CHATS = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"x":1.10}],"odd":{"b":null}}\n\n',
    ": keep-alive é\n\n".encode(),
    b'data: {"choices": [{"index":0, "delta":{"content":"Hi"}}]}\r\n\r\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n',
    b"data: [DONE]\n\n",
]
WIRE = b"".join(EVENTS)


def passing(url: str, model: str | None = None, **server: Any) -> tuple[dict[str, Any], Settings]:
    """A gateway's arguments: model "up" leads to the endpoint at `url`, which knows it as `model`."""
    settings = Settings(
        server=ServerSettings(**server),
        backends={"up": OpenAISettings(base_url=url)},  # type: ignore[arg-type]
        models={MODEL: ModelSettings(backend="up", upstream_model=model)},
    )
    return {}, settings


def post(running: Any, body: Any = BODY, path: str = CHATS, **fields: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **fields.pop("headers", {})}
    return httpx.post(f"{running.url}{path}", content=content, headers=headers, timeout=60, **fields)


def test_an_answer_passes_byte_for_byte(gateway: Any, upstream: Any) -> None:
    body = (
        '{ "choices":[], "n": 1.10, "odd": {"é":[1e400]}, "usage": {"prompt_tokens":4,"completion_tokens":2} }'.encode()
    )
    server = upstream(lambda request: request.answer(body, 200, "application/json", openai_processing_ms="5"))
    running = gateway(*passing(server.url))
    sent = b' {"model":"up", "messages":[], "temperature":1.10,"reasoning":{"a":[null]}, "stream":false }'
    headers = {"x-agentspec-step": "plan", "cookie": "c=1", "authorization": "Bearer mine", "x-request-id": "r1"}
    response = post(running, sent, headers=headers, params={"api-version": "2"})
    assert response.content == body and response.headers["openai-processing-ms"] == "5"
    [request] = (request for request in server.requests if request.method == "POST")
    assert request.body == sent and request.target == "/v1/chat/completions?api-version=2"
    assert request.headers["authorization"] == "Bearer mine" and "cookie" not in request.headers
    assert request.headers["x-agentspec-step"] == "plan" and request.headers["x-request-id"] == "r1"
    assert running.metric("agentspec_completion_tokens_total", model=MODEL) == 2


USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
QUOTED = {"choices": [{"message": {"content": '"usage": {"completion_tokens": 9}'}}]}


@pytest.mark.parametrize("filler", [{}, {"data": ["x" * (1 << 20)]}], ids=["short", "long"])
@pytest.mark.parametrize(
    ("fields", "counted"),
    [({**QUOTED, "usage": USAGE}, 2), ({"usage": USAGE, "kv_transfer_params": None}, 2), (QUOTED, 0)],
)
def test_the_usage_of_an_answer_is_counted_and_no_text_that_quotes_one(
    gateway: Any, upstream: Any, filler: dict[str, Any], fields: dict[str, Any], counted: int
) -> None:
    body = json.dumps({**filler, **fields}).encode()
    running = gateway(*passing(upstream(lambda request: request.answer(body)).url))
    assert post(running).content == body
    assert running.metric("agentspec_completion_tokens_total", model=MODEL) == counted


def test_a_header_in_several_lines_passes_whole(gateway: Any, upstream: Any) -> None:
    server = upstream(lambda request: request.answer(b"{}"))
    running = gateway(*passing(server.url))
    headers = [("content-type", "application/json"), ("anthropic-beta", "a, b"), ("anthropic-beta", "c"),
               ("tracestate", "x=1"), ("tracestate", "y=2"), ("x-agentspec-step", "plan"),
               ("x-agentspec-step", "other")]  # fmt: skip
    httpx.post(f"{running.url}{CHATS}", content=json.dumps(BODY).encode(), headers=headers, timeout=60)
    [request] = (request for request in server.requests if request.method == "POST")
    assert (request.headers["anthropic-beta"], request.headers["tracestate"]) == ("a, b, c", "x=1, y=2")
    assert request.headers["x-agentspec-step"] == "plan"


@pytest.mark.parametrize("path", [CHATS, "/v1/messages"])
def test_a_route_that_an_upstream_lacks_hints_at_its_address(gateway: Any, upstream: Any, path: str) -> None:
    running = gateway(*passing(upstream(lambda request: request.answer(b'{"detail":"Not Found"}', 404)).url))
    answer = post(running, {**BODY, "max_tokens": 5}, path)
    assert answer.status_code == 404 and "base_url should end in /v1, once" in answer.json()["error"]["message"]


def test_events_pass_as_they_come(gateway: Any, upstream: Any) -> None:
    came = threading.Semaphore(0)

    def script(request: Any) -> None:
        request.head()
        for event in EVENTS:
            request.send(event)
            came.acquire(timeout=60)  # no event is sent before the one in front of it has come

    running = gateway(*passing(upstream(script).url))
    pieces = []
    with httpx.stream("POST", f"{running.url}{CHATS}", json=BODY, timeout=300) as response:
        for piece in response.iter_raw():
            pieces.append(piece)
            came.release()
    assert pieces == EVENTS


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_an_answer_without_a_body_has_no_length(gateway: Any, upstream: Any, kind: str) -> None:
    running = gateway(*passing(upstream(lambda request: request.head(204, kind)).url))
    with httpx.Client() as client:
        for _ in range(2):  # the connection is still in order
            response = client.post(f"{running.url}{CHATS}", json=BODY, timeout=60)
            assert (response.status_code, response.content) == (204, b"")
            assert not {"content-length", "transfer-encoding"} & response.headers.keys()


def test_a_gateway_behind_a_gateway(gateway: Any) -> None:
    speculation = Speculation(5, 4, 3, 0.25)
    backend = FakeBackend(Answer("brave new world", speculation=speculation))
    inner = gateway({"fake": backend})
    outer = gateway(*passing(f"{inner.url}/v1", "fake"))
    headers = {"x-agentspec-session": "s%20%C3%A9", "x-agentspec-speculation": "on"}
    with openai.OpenAI(base_url=f"{outer.url}/v1", api_key="k", max_retries=0, default_headers=headers) as client:
        answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "brave new world" and answer.model == "fake"
        assert answer.to_dict()["speculation"]["accepted"] == 4  # type: ignore[index]
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=[], temperature=0)
        assert caught.value.param == "messages"
    assert {request.labels.session for request in backend.requests} == {"s é"}
    assert outer.metric("agentspec_accepted_tokens_total", model=MODEL) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_vllm_reports_of_speculation_is_counted(gateway: Any, upstream: Any, stream: bool) -> None:
    """vLLM counts the forwards with a draft alone: 3, where 20 - 12 wrote the answer."""
    found = {"num_draft_tokens": 15, "num_accepted_draft_tokens": 12, "num_spec_steps": 3}
    usage = {"prompt_tokens": 1, "completion_tokens": 20}
    whole = {"choices": [], "usage": usage, "metrics": {"speculative_decoding": found}}
    content = json.dumps(whole).encode()
    kind = "text/event-stream" if stream else "application/json"
    content = b"data: " + content + b"\n\ndata: [DONE]\n\n" if stream else content
    outer = gateway(*passing(upstream(lambda request: request.answer(content, content_type=kind)).url))
    assert httpx.post(f"{outer.url}{CHATS}", json=BODY | {"stream": stream}, timeout=60).content == content
    counted = [outer.metric(f"agentspec_{name}_total", model=MODEL) for name in ("draft_tokens", "accepted_tokens")]
    assert [*counted, outer.metric("agentspec_verify_steps_total", model=MODEL)] == [15, 12, 8]


def test_a_sole_upstream_takes_any_model(gateway: Any, upstream: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "agentspec.proxy")
    server = upstream(lambda request: request.answer(b"{}"))
    settings = Settings(backends={"up": OpenAISettings(base_url=server.url)})  # type: ignore[arg-type]
    running = gateway({}, settings)
    for name in ("one", "two", "secret prompt"):
        assert post(running, {**BODY, "model": name}).status_code == 200
        assert server.requests[-1].json["model"] == name
    assert running.metric("agentspec_requests_total", route=CHATS, model="other", outcome="ok") == 3
    server.script = lambda request: request.answer(b'{"data":[{"id":"org/one","max_model_len":9}]}')
    listed = httpx.get(f"{running.url}/v1/models", headers={"authorization": "Bearer mine"}).json()
    assert listed == {"object": "list", "data": [{"id": "org/one", "max_model_len": 9}]}
    assert server.requests[-1].headers["authorization"] == "Bearer mine"
    assert httpx.get(f"{running.url}/v1/models/org/one").json() == listed["data"][0]
    assert httpx.get(f"{running.url}/v1/models/other").status_code == 404
    assert b"secret" not in running.app.metrics.render()
    assert "'model': 'other'" in caplog.text and "secret" not in caplog.text
