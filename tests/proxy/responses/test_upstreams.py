"""`/v1/responses` of upstreams: bytes where they have the route, a translation where they have not; tenants apart."""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import ModelSettings, Settings
from tests.proxy.upstreams import HTTP, Script, chats, posted, scripted, settings

ROUTE = "/v1/responses"
RESPONSE = (
    b'{"metadata": {"id": "resp_other"}, "id" : "resp_1", "object":"response", "odd": {"x": 1.10},'
    b' "output": [], "usage": {"input_tokens": 4, "output_tokens": 2, "total_tokens": 6} }'
)
EVENTS = [
    b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"resp_1"}}\n\n',
    b'data: {"type":"response.output_text.delta","sequence_number":1,"delta":"\\"response.completed\\"",'
    b'"odd":1.10}\r\n\r\n',
    b'event: response.completed\ndata: {"type":"response.completed","sequence_number":2,"response":{"id":"resp_1",'
    b'"usage":{"input_tokens":4,"output_tokens":2}}}\n\n',
]
WIRE = b"".join(EVENTS)
CHAT = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 1}},
}


def native(owner: str = "other", answer: Script = lambda request: request.answer(RESPONSE)) -> Script:
    """An upstream with the route."""
    return scripted(answer, ROUTE, owner)


def chats_only(owner: str = "other") -> Script:
    """An upstream without the route."""
    return chats(lambda request: request.answer(json.dumps(CHAT).encode()), owner)


def post(running: Any, body: Any, tenant: str = "", headers: Any = None, **query: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps({"model": "m", "input": "hi", **body}).encode()
    given = {"content-type": "application/json", **(headers or {})}
    given |= {"authorization": f"Bearer key-of-{tenant}"} if tenant else {}
    return HTTP.post(f"{running.url}{ROUTE}", content=content, headers=given, timeout=60, **query)


def test_bytes_pass_both_ways(gateway: Any, upstream: Any) -> None:
    server = upstream(native())
    running = gateway({}, settings(server.url))
    sent = b' {"model":"m", "input" : [{"type":"mystery","x":1.10}], "user":null, "background":false }'
    for _ in range(2):
        answer = post(running, sent)
        assert answer.content == RESPONSE and "x-agentspec-translated" not in answer.headers
    assert [one.body for one in posted(server, ROUTE)] == [sent, sent]
    assert len([one for one in server.requests if one.body == b"{}"]) == 1, "the route is looked for once"
    assert running.metric("agentspec_completion_tokens_total", model="m") == 4


@pytest.mark.parametrize("step", [len(WIRE), 1, 50])
def test_a_stream_passes_byte_for_byte(gateway: Any, upstream: Any, step: int) -> None:
    def answer(request: Any) -> None:
        request.head(200, transfer_encoding="chunked")
        for start in range(0, len(WIRE), step):
            request.chunk(WIRE[start : start + step])
        request.chunk(b"")

    running = gateway({}, settings(upstream(native(answer=answer)).url))
    assert post(running, {"stream": True}).content == WIRE
    assert running.metric("agentspec_completion_tokens_total", model="m") == 2
    assert running.runtime.cache.responses.get("default", "resp_1").backend == "up"


def test_the_empty_request_carries_the_clients_key_and_nothing_else_of_it(gateway: Any, upstream: Any) -> None:
    """A server that knows `idempotency-key` would answer the real request as it answered the empty one."""
    server = upstream(native())
    running = gateway({}, settings(server.url))
    own = {"idempotency-key": "once", "x-request-id": "r1", "x-agentspec-session": "s"}
    account = {"authorization": "Bearer mine", "openai-project": "p"}
    assert post(running, {}, headers={**own, **account}).content == RESPONSE
    [asked], [sent] = ([one for one in server.requests if one.body == b"{}"], posted(server, ROUTE))
    assert account.items() <= asked.headers.items() and not own.keys() & asked.headers.keys()
    assert (account | own).items() <= sent.headers.items()


def test_the_store_header_reaches_the_upstream(gateway: Any, upstream: Any) -> None:
    server = upstream(native())
    running = gateway({}, settings(server.url))
    for body in (b'{"model":"m","input":"hi"}', b'{"model":"m","store": true,"input":"hi"}'):
        post(running, body, headers={"x-agentspec-store": "off"})
    assert [one.json["store"] for one in posted(server, ROUTE)] == [False, False]
    assert running.runtime.cache.responses.get("default", "resp_1") is None


def test_a_stored_response_is_asked_of_its_upstream(gateway: Any, upstream: Any) -> None:
    server = upstream(native())
    running = gateway({}, settings(server.url))
    post(running, {})
    path = f"{ROUTE}/resp_1?include=x"
    assert HTTP.get(running.url + path).content == RESPONSE
    assert (server.requests[-1].method, server.requests[-1].target) == ("GET", path)
    HTTP.delete(f"{running.url}{ROUTE}/resp_1")
    assert (server.requests[-1].method, server.requests[-1].target) == ("DELETE", f"{ROUTE}/resp_1")
    assert running.runtime.cache.responses.get("default", "resp_1") is None
    HTTP.get(f"{running.url}{ROUTE}/resp_9")
    assert server.requests[-1].target == f"{ROUTE}/resp_9", "a sole tenant's ids may be older than this gateway"


def test_a_client_that_leaves_a_stored_stream_cancels_it(gateway: Any, upstream: Any, until: Any) -> None:
    left = threading.Event()

    def answer(request: Any) -> None:
        if request.method == "POST":
            request.answer(RESPONSE)
            return
        request.head()
        request.send(EVENTS[0])
        if request.client_left(60):
            left.set()

    running = gateway({}, settings(upstream(native(answer=answer)).url))
    post(running, {"background": True})
    with HTTP.stream("GET", f"{running.url}{ROUTE}/resp_1?stream=true") as streamed:
        assert next(streamed.iter_raw()) == EVENTS[0]
    assert left.wait(60)
    until(lambda: running.app.slots.running == 0)


@pytest.mark.parametrize("path", [f"{ROUTE}/..", f"{ROUTE}/.", f"{ROUTE}/%2e%2e"])
def test_the_id_of_a_response_is_no_way_to_other_routes(gateway: Any, upstream: Any, path: str) -> None:
    server = upstream(native())
    host, port = gateway({}, settings(server.url)).url.removeprefix("http://").split(":")
    for method in ("GET", "DELETE"):
        with closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
            connection.request(method, path)
            assert connection.getresponse().status in (404, 405)
    assert not [one.target for one in server.requests if one.target != "/v1/models" and one.body != b"{}"]


@pytest.mark.parametrize("id", ["resp_1", "resp_" + "bGl0ZQ" * 50], ids=["short", "of another gateway"])
def test_tenants_responses_are_apart_at_an_upstream(gateway: Any, upstream: Any, tmp_path: Path, id: str) -> None:
    """Long ids hold the way to the response, as some gateways write it."""
    content = RESPONSE.replace(b'"resp_1"', f'"{id}"'.encode())
    server = upstream(native("vllm", lambda request: request.answer(content)))
    running = gateway({}, settings(server.url, tmp_path))
    assert post(running, {}, "alice").status_code == 200
    assert post(running, {"previous_response_id": id}, "alice").status_code == 200
    count = len(server.requests)
    for previous in (id, f"{id}x", "resp_other"):
        refused = post(running, {"previous_response_id": previous}, "bob")
        assert refused.status_code == 404 and refused.json()["error"]["param"] == "previous_response_id"
    headers = {"authorization": "Bearer key-of-bob"}
    for method in ("GET", "DELETE"):
        assert HTTP.request(method, f"{running.url}{ROUTE}/{id}", headers=headers).status_code == 404
    assert len(server.requests) == count, "nothing of it reached the upstream"
    assert post(running, {}, "bob").status_code == 200, "an upstream that gives an id twice"
    refused = post(running, {"previous_response_id": id}, "bob")
    assert refused.status_code == 404
    salts = [one.json["cache_salt"] for one in posted(server, ROUTE)]
    assert salts[0] == salts[1] != salts[2] and len(salts[0]) == 64
    headers = {"authorization": "Bearer key-of-alice"}
    calls = ("GET", "DELETE", "GET")
    found = [HTTP.request(method, f"{running.url}{ROUTE}/{id}", headers=headers).status_code for method in calls]
    assert found == [200, 200, 404] and server.requests[-1].target == f"{ROUTE}/{id}"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    ({"input": [{"id": "msg_1"}]}, "input[0].id"),
    ({"input": [{"id": "msg_1", "type": None}]}, "input[0].id"),
    ({"input": [{"id": "msg_1", "role": None, "content": None}]}, "input[0].id"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].file_id"),
    ({"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]}, "tools[0].vector_store_ids"),
    ({"tools": [{"type": "code_interpreter", "container": "cntr_1"}]}, "tools[0].container"),
    ({"Previous_Response_Id": "resp_1"}, "Previous_Response_Id"),
    ({"tools": [{"type": "mcp", "server_url": "http://x"}]}, "tools[0].type"),
    ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input[0].id"),
    ({"input": [{"type": "image_generation_call", "id": "ig_1"}]}, "input[0].id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y"}]}]},
     "input[0].content[0].image_url"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_names_of_stored_objects_are_refused_with_several_tenants(of_two: Any, fields: Any, param: str) -> None:
    refused = post(of_two, fields, "alice")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages"])
def test_other_routes_name_no_files_of_other_tenants_either(of_two: Any, route: str) -> None:
    content = [{"type": "file", "file": {"file_id": "file-1"}}]
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    refused = HTTP.post(of_two.url + route, json=body, headers={"authorization": "Bearer key-of-bob"})
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(
        "messages[0].file_id names what"
    )


@pytest.fixture(scope="module")
def of_two(shared_gateway: Any, shared_upstream: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return shared_gateway({}, settings(shared_upstream(native("vllm")).url, tmp_path_factory.mktemp("keys")))


def test_hosted_models_get_the_length_by_its_newer_name(
    gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # no test can reach OpenAI's own servers
    monkeypatch.setattr("agentspec.proxy.completions.translation._HOSTED", ("127.0.0.1",))
    server = upstream(chats_only())
    running = gateway({}, settings(server.url))
    assert post(running, {"max_output_tokens": 9}).status_code == 200
    said = {"messages": [{"role": "user", "content": "hi"}], "model": "m", "max_tokens": 8}
    assert HTTP.post(f"{running.url}/v1/messages", json=said).status_code == 200
    sent = [one.json for one in posted(server, "/v1/chat/completions")]
    assert [(one.get("max_tokens"), one["max_completion_tokens"]) for one in sent] == [(None, 9), (None, 8)]


def test_translated_conversations_go_on_by_id(gateway: Any, upstream: Any, tmp_path: Path) -> None:
    server = upstream(chats_only("vllm"))
    running = gateway({}, settings(server.url, tmp_path))
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="key-of-alice", max_retries=0) as client:
        first = client.responses.create(model="m", input="one")
        client.responses.create(model="m", input="two", previous_response_id=first.id)
        assert client.responses.retrieve(first.id).output_text == "hello"
    sent = posted(server, "/v1/chat/completions")
    assert [one["content"] for one in sent[-1].json["messages"]] == ["one", "hello", "two"]
    assert len(sent[-1].json["cache_salt"]) == 64
    assert post(running, {"previous_response_id": first.id}, "bob").status_code == 404


def test_what_one_upstream_may_get_does_not_reach_another_by_id(gateway: Any, upstream: Any) -> None:
    server = upstream(chats_only())
    allowed = {"open": ("images.example.com",), "closed": ()}
    backends = {name: OpenAISettings(base_url=server.url, allow_media_hosts=hosts) for name, hosts in allowed.items()}
    models = {name: ModelSettings(backend=name) for name in backends}
    running = gateway({}, Settings(backends=backends, models=models))
    image = {"type": "input_image", "image_url": "https://images.example.com/a.png"}
    first = post(running, {"model": "open", "input": [{"role": "user", "content": [image]}]}).json()
    again = {"previous_response_id": first["id"]}
    assert post(running, {"model": "open", **again}).status_code == 200
    count = len(posted(server, "/v1/chat/completions"))
    refused = post(running, {"model": "closed", **again})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    assert len(posted(server, "/v1/chat/completions")) == count
