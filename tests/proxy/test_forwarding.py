"""Requests that pass to an upstream and answers that pass back, and what is read of them."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from agentspec.backends.base import CHAT, COMPLETIONS
from agentspec.backends.settings import OpenAISettings
from agentspec.proxy import forwarding
from agentspec.proxy.forwarding import StreamInspector, expected_choices, read_answer
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Speculation, Usage

DONE = b"data: [DONE]\n\n"
SPECULATION = {"drafted": 5, "accepted": 4, "steps": 3, "estimated_seconds_saved": 0.25}


def chunk(text: str = "", finish: str | None = None, index: int = 0, **fields: Any) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **fields}).encode() + b"\n\n"


def read(*events: bytes, choices: int = 1) -> StreamInspector:
    inspector = StreamInspector(choices)
    for piece in events:
        inspector.read(piece)
    return inspector


def test_the_end_is_a_finish_reason_or_the_word_for_it() -> None:
    assert not read().finished and not read(chunk("a")).finished
    assert read(chunk("a", "stop")).finished and read(chunk("a"), DONE).finished
    assert (
        read(b"data:[DONE]\r\n\r\n").done
        and read(b'data: {"choices": [{"finish_reason":\ndata: "stop"}]}\n\n').finished
    )
    assert not read(chunk("a", "")).finished


@pytest.mark.parametrize(
    "text",
    [
        "data: [DONE]",
        "\n\ndata: [DONE]\n\n",
        '"finish_reason": "stop"',
        '{"finish_reason":"stop"}',
        "[DONE]",
        '"error":1',
    ],
)
def test_text_that_looks_like_an_end_is_none(text: str) -> None:
    tools = [{"index": 0, "function": {"arguments": json.dumps({"finish_reason": "stop", "error": text})}}]
    inside = {"index": 0, "delta": {"tool_calls": tools}, "finish_reason": None}
    event = b"data: " + json.dumps({"choices": [inside]}).encode() + b"\n\n"
    inspector = read(chunk(text), event, b"data: [DONE] is what a model said\n\n", b": data: [DONE]\n\n")
    assert not inspector.finished and inspector.error is None


def test_every_choice_must_end() -> None:
    first, second = chunk("", "stop", 0), chunk("", "length", 1)
    assert not read(first, first, choices=2).finished
    assert read(second + chunk("x") + first, choices=2).finished
    assert read(first, DONE, choices=2).finished


def test_how_many_choices_there_are() -> None:
    assert expected_choices(CHAT, {}) == expected_choices(CHAT, {"n": None}) == expected_choices(CHAT, {"n": "3"}) == 1
    assert expected_choices(CHAT, {"n": 3, "prompt": ["a", "b"]}) == 3
    assert expected_choices(COMPLETIONS, {"n": 3, "prompt": "a"}) == 3
    assert expected_choices(COMPLETIONS, {"n": 3, "prompt": ["a", "b"]}) == 6
    assert expected_choices(COMPLETIONS, {"prompt": [[1, 2], [3]]}) == 2
    assert expected_choices(COMPLETIONS, {"prompt": [1, 2, 3]}) == expected_choices(COMPLETIONS, {"prompt": []}) == 1


def test_counts_and_errors_are_read() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    inspector = read(chunk("a", usage=None), chunk("b", usage=usage, speculation=SPECULATION))
    assert inspector.counts.usage == Usage(3, 2) and inspector.counts.speculation == Speculation(5, 4, 3, 0.25)
    failed = read(b'event: error\ndata: {"error": {"message": "out of memory", "code": 500}}\n\n')
    assert failed.finished and not failed.done and failed.error["code"] == 500
    old = read(b'data: {"object": "error", "message": "no", "code": 400}\n\n' + DONE)
    assert old.done and old.error["code"] == 400 and read(b"data: [DONE] \n\n").done


@pytest.mark.parametrize(
    "data",
    [
        b'{"usage": [1], "choices": 5}',
        b'{"usage": {"prompt_tokens": "x"}, "choices": [7, {"finish_reason": 3, "index": "x"}]}',
        b'[{"finish_reason": "stop"}]',
        b'{"finish_reason": "stop"',
        b'"\xff" "usage": {',
        b'{"usage": ' + b"[" * 100_000,
        b'{"usage": {"prompt_tokens": 1' + b"0" * 5000 + b"}}",
    ],
)
def test_what_makes_no_sense_is_passed_over(data: bytes) -> None:
    inspector = read(b"data: " + data + b"\n\n", chunk(usage={"prompt_tokens": 1}))
    assert inspector.counts.usage == Usage(1) and not inspector.done


def test_events_that_tell_nothing_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []
    monkeypatch.setattr(forwarding, "object_in", lambda data: parsed.append(data) or {})
    read(chunk("hello", usage=None), chunk('"usage": {'), b": ping\n\n", chunk(index=3))
    assert not parsed
    read(chunk("x") + chunk("", "stop") + chunk("y"))
    assert len(parsed) == 1


@pytest.mark.parametrize("long", [False, True])
def test_the_counts_of_a_whole_answer(long: bool) -> None:
    filler = {"data": ["x" * (1 << 20)]} if long else {}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    text = {"choices": [{"message": {"content": '"usage": {"prompt_tokens": 9}'}}]}
    for answer in (
        {**filler, **text, "usage": usage},
        {**filler, "usage": usage, "kv_transfer_params": None},
    ):
        assert read_answer(json.dumps(answer).encode()) == (read_answer(json.dumps({"usage": usage}).encode())[0], None)
    assert read_answer(json.dumps({**filler, **text}).encode())[0].usage is None
    assert read_answer(b'{"error": {"code": 400}}')[1] == {"code": 400}
    assert read_answer(b"x" * (1 << 20) + b'"usage": {"prompt_tokens": ')[0].usage is None


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
OPEN_ELSEWHERE = [
    "/invocations", "/pooling", "/score", "/rerank", "/pause", "/resume",
    "/update_weights", "/load", "/ping", "/v1/responses/x/cancel", "/v1/audio/speech", "/v1/load_lora_adapter",
    "/v1/files", "/inference/v1/generate", "/docs", "/openapi.json", "//v1/chat/completions",
    "/v1//chat/completions", "/v1/chat/completions/", "/v1/chat/../completions", "/v1/%2e%2e/invocations",
    "/v1/chat%2Fcompletions/x", "/V1/chat/completions", "/",
]  # fmt: skip


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


def test_only_the_model_is_renamed(gateway: Any, upstream: Any) -> None:
    server = upstream(lambda request: request.answer(b"{}"))
    running = gateway(*passing(server.url, "org/big"))
    post(running, b'{"temperature":1.10,"model" : "up","user":"\\u00e9"}')
    assert server.requests[0].body == '{"temperature":1.1,"model":"org/big","user":"\u00e9"}'.encode()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_the_other_routes(gateway: Any, upstream: Any, path: str) -> None:
    server = upstream(lambda request: request.answer(b'{"data":[]}'))
    assert post(gateway(*passing(server.url)), b'{"model":"up"}', path=path).content == b'{"data":[]}'
    assert server.requests[0].target == path


def test_upstreams_that_no_name_leads_to_list_nothing(gateway: Any, upstream: Any) -> None:
    up = OpenAISettings(base_url=upstream(lambda request: request.answer(b"{}")).url)
    running = gateway({}, Settings(backends={"a": up, "b": up}))
    assert httpx.get(f"{running.url}/v1/models").json() == {"object": "list", "data": []}
    assert post(running).status_code == 404


@pytest.mark.parametrize("pieces", [len(WIRE), 1, 7])
def test_a_stream_passes_byte_for_byte(gateway: Any, upstream: Any, pieces: int) -> None:
    def script(request: Any) -> None:
        request.head(200, transfer_encoding="chunked")
        step = -(-len(WIRE) // pieces) if pieces > 1 else len(WIRE)
        for position in range(0, len(WIRE), step):
            request.chunk(WIRE[position : position + step])
        request.chunk(b"")

    running = gateway(*passing(upstream(script).url))
    response = post(running)
    assert response.content == WIRE and response.headers["content-type"] == "text/event-stream"
    assert running.metric("agentspec_completion_tokens_total", model=MODEL) == 2
    assert running.metric("agentspec_time_to_first_token_seconds_count", model=MODEL) == 1


def test_curl_gets_an_upstreams_bytes(gateway: Any, upstream: Any) -> None:
    def script(request: Any) -> None:
        request.head()
        request.send(WIRE)

    running = gateway(*passing(upstream(script).url))
    command = ["curl", "-sSN", "--max-time", "20", f"{running.url}{CHATS}", "-H", "content-type: application/json"]
    done = subprocess.run([*command, "-d", json.dumps(BODY)], capture_output=True, check=True)
    assert done.stdout == WIRE


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


@pytest.mark.parametrize("cut", range(len(EVENTS)))
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("clean", [False, True])
def test_a_cut_stream_is_never_silent(upstream_cut: Any, cut: int, half: bool, clean: bool) -> None:
    """U6. `clean`: the connection ends as if all were well, which only the missing finish gives away."""
    running, script = upstream_cut
    script["pieces"] = [*EVENTS[:cut], *([EVENTS[cut][:9]] if half else [])]
    script["clean"] = clean
    content = post(running).content
    whole = b"".join(EVENTS[:cut])
    finished = clean and cut > 3
    assert content.startswith(whole)
    rest = content[len(whole) :]
    if finished:
        assert rest == (EVENTS[cut][:9] if half else b"")
    else:
        assert rest.startswith(b'data: {"error":{') and rest.endswith(b"\n\n") and rest.count(b"data:") == 1


@pytest.fixture(scope="module")
def upstream_cut(shared_gateway: Any, shared_upstream: Any) -> Any:
    """A gateway, and what its upstream sends: `pieces`, then a `clean` end or a broken connection."""
    state: dict[str, Any] = {}

    def script(request: Any) -> None:
        request.head(200, transfer_encoding="chunked")
        for piece in state["pieces"]:
            request.chunk(piece)
        if state["clean"]:
            request.chunk(b"")

    return shared_gateway(*passing(shared_upstream(script).url)), state


def test_the_client_is_told_of_a_cut(gateway: Any, upstream: Any) -> None:
    def script(request: Any) -> None:
        request.head()
        request.send(EVENTS[0] + EVENTS[2])

    running = gateway(*passing(upstream(script).url))
    told = openai.OpenAI(base_url=f"{running.url}/v1", api_key="k", max_retries=0)
    with told as client, pytest.raises(openai.APIError, match="before it was finished"):
        list(client.chat.completions.create(model=MODEL, messages=[], stream=True))


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
def test_errors_pass_with_status_body_and_retry_headers(gateway: Any, upstream: Any, status: int) -> None:
    body = b'{"error": {"message": "no", "code": 7}, "more": 1.10}'
    server = upstream(lambda request: request.answer(body, status, retry_after="2", retry_after_ms="1500", server="x"))
    response = post(gateway(*passing(server.url)))
    assert (response.status_code, response.content) == (status, body)
    assert response.headers["retry-after"] == "2" and response.headers["retry-after-ms"] == "1500"
    assert "server" not in response.headers and len(server.requests) == 1


def test_redirects_are_not_followed_nor_passed_on(gateway: Any, upstream: Any) -> None:
    server = upstream(lambda request: request.answer(b"", 307, location="http://169.254.169.254/"))
    response = post(gateway(*passing(server.url)))
    assert response.status_code == 502 and "location" not in response.headers and len(server.requests) == 1


def test_nobody_there(gateway: Any) -> None:
    response = post(gateway(*passing("http://127.0.0.1:9/v1")))
    assert response.status_code == 502 and response.json()["error"]["code"] == "upstream_unreachable"


def test_a_silent_upstream(gateway: Any, upstream: Any) -> None:
    """U4: nothing for the time limit; the connection is closed."""
    left = threading.Event()

    def script(request: Any) -> None:
        if request.client_left(60):
            left.set()

    running = gateway(*passing(upstream(script).url, request_timeout=0.4))
    assert post(running).status_code == 504
    assert left.wait(60)


def test_a_stalled_stream(gateway: Any, upstream: Any) -> None:
    """U5: an error event, not a silent end."""

    def script(request: Any) -> None:
        request.head()
        request.send(EVENTS[0])
        request.client_left(60)

    response = post(gateway(*passing(upstream(script).url, request_timeout=6.0)))  # in which the first event comes
    assert response.content.startswith(EVENTS[0]) and b'"code":"request_timeout"' in response.content


def test_the_upstreams_own_read_timeout(gateway: Any, upstream: Any) -> None:
    server = upstream(lambda request: request.client_left(60) and None)
    response = post(gateway({"up": server.backend(read_timeout=0.3)}, passing(server.url)[1]))
    assert response.status_code == 504 and response.json()["error"]["code"] == "upstream_timeout"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_the_upstream(
    gateway: Any, upstream: Any, until: Callable[..., None], stream: bool
) -> None:
    asked, left = threading.Event(), threading.Event()

    def script(request: Any) -> None:
        if stream:
            request.head()
            request.send(EVENTS[0])
        asked.set()
        if request.client_left(60):
            left.set()

    running = gateway(*passing(upstream(script).url))
    if stream:
        with httpx.stream("POST", f"{running.url}{CHATS}", json=BODY) as response:
            next(response.iter_raw())
    else:
        content = json.dumps(BODY).encode()
        head = f"POST {CHATS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=60) as client:
            client.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
            assert asked.wait(60)
    assert left.wait(60)
    until(lambda: running.app.limiter.running == 0)


@pytest.mark.parametrize(
    "wire",
    [
        b"data: {half\n\n" + WIRE,
        b"data: \xc3\n\n" + WIRE,
        b"\r\n\r\n: x\r\r" + WIRE.replace(b"\n", b"\r\n"),
        b"data: " + b"y" * (3 << 20) + b"\n\n" + WIRE,
        b'data: {"usage": [1], "choices": 5}\n\ndata: {"usage": {"prompt_tokens": "x"}}\n\n' + WIRE,
        b'data: {"usage":{"prompt_tokens":-5,"completion_tokens":1' + b"0" * 400 + b"}}\n\n" + EVENTS[3] + EVENTS[5],
    ],
    ids=["not-json", "half-utf8", "crlf", "huge-line", "odd-usage", "huge-usage"],
)
def test_malformed_streams_pass_unchanged(gateway: Any, upstream: Any, wire: bytes) -> None:
    """U7, U8: what the upstream says is the client's to judge."""

    def script(request: Any) -> None:
        request.head()
        request.send(wire)

    running = gateway(*passing(upstream(script).url))
    assert post(running).content == wire
    outcome = {"route": CHATS, "model": MODEL, "outcome": "ok"}
    assert running.metric("agentspec_requests_total", **outcome) == 1


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b'{"usage": {"prompt_tokens": null}}', b'{"usage": "x"}'])
def test_odd_answers_pass_unchanged(gateway: Any, upstream: Any, body: bytes) -> None:
    server = upstream(lambda request: request.answer(body))
    response = post(gateway(*passing(server.url)))
    assert (response.status_code, response.content) == (200, body)


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_an_answer_that_has_no_body_tells_no_length(gateway: Any, upstream: Any, kind: str) -> None:
    running = gateway(*passing(upstream(lambda request: request.head(204, kind)).url))
    with httpx.Client() as client:
        for _ in range(2):  # the connection is still in order
            response = client.post(f"{running.url}{CHATS}", json=BODY, timeout=60)
            assert (response.status_code, response.content) == (204, b"")
            assert not {"content-length", "transfer-encoding"} & response.headers.keys()


def test_paths_beside_the_listed_ones_reach_nobody(gateway: Any, upstream: Any) -> None:
    """C9, with the routes that vLLM leaves open."""
    server = upstream(lambda request: request.answer(b"{}"))
    running = gateway(*passing(server.url))
    for path in OPEN_ELSEWHERE:
        response = _raw(running.url.removeprefix("http://"), path)
        assert response.startswith(b"HTTP/1.1 404") and b'"error":' in response, path
    assert server.requests == []


def _raw(address: str, path: str) -> bytes:
    host, port = address.split(":")
    body = json.dumps(BODY).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        received = b""
        while more := connection.recv(65536):
            received += more
    return received


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 2\r\ncontent-length: 3\r\n",
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
        b"content-length: -2\r\n",
        b"x-a: b\r\n c\x00d: e\r\n",
    ],
)
def test_smuggled_headers_reach_nobody(gateway: Any, upstream: Any, head: bytes) -> None:
    server = upstream(lambda request: request.answer(b"{}"))
    address = gateway(*passing(server.url)).url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.settimeout(60)
        first = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(first + head + b"\r\n{}")
        assert connection.recv(65536).startswith(b"HTTP/1.1 4")
    assert server.requests == []


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
