"""What upstreams are sent of tenants and of the names that agents give themselves; vLLM's labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.errors import ConfigurationError
from agentspec.runtime import Runtime
from tests.proxy.upstreams import HTTP, chats, posted, settings

ANSWER = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": null}'
HEADERS = {"x-agentspec-session": "s1", "x-agentspec-step": "pl%C3%A4n", "content-type": "application/json"}
XARGS = {"agentspec_session": "s1", "agentspec_step": "pl\u00e4n"}


def serve(owner: str = "vllm") -> Any:
    return chats(lambda request: request.answer(ANSWER), owner)


def tokenizing(tokens: bytes | None) -> Any:
    """A script for vLLM with a tokenizer that knows one text, or without one."""
    plain = serve()

    def script(request: Any) -> None:
        if request.target != "/tokenize":
            return plain(request)
        if tokens is None:
            return request.answer(b"{}", status=404)
        assert json.loads(request.body) == {"model": "m", "prompt": "def f(): pass", "add_special_tokens": False}
        request.answer(b'{"count": 2, "tokens": ' + tokens + b"}")

    return script


def post(running: Any, content: bytes, path: str = "/v1/chat/completions") -> httpx.Response:
    return httpx.post(f"{running.url}{path}", content=content, headers=HEADERS, timeout=60)


def sent(server: Any) -> list[bytes]:
    return [request.body for request in posted(server)]


def test_the_clients_own_arguments_stay(gateway: Any, upstream: Any) -> None:
    server = upstream(serve())
    post(gateway({}, settings(server.url)), b'{"model":"m","vllm_xargs":{"k":[1,"a"],"agentspec_step":"theirs"}}')
    assert json.loads(sent(server)[0])["vllm_xargs"] == {"k": [1, "a"], **XARGS}


PREDICTED = b'{"model":"m", "messages":[], "prediction": {"type": "content", "content": "def f(): pass"}}'


@pytest.mark.parametrize("tokens", [b"[5, 6]", b"[]", b'["a"]', b"7", None])
def test_a_prediction_is_handed_to_the_drafter_as_token_ids(gateway: Any, upstream: Any, tokens: bytes | None) -> None:
    server = upstream(tokenizing(tokens))
    answer = post(gateway({}, settings(server.url)), PREDICTED)
    body = json.loads(sent(server)[-1])
    predicted = {"agentspec_prediction": [5, 6]} if tokens == b"[5, 6]" else {}
    assert body == {**json.loads(PREDICTED), "vllm_xargs": {**XARGS, **predicted}, "session_id": "s1"}
    assert answer.content == ANSWER


BODY = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def send(running: Any, path: str = "/v1/chat/completions", body: Any = BODY, **headers: str) -> httpx.Response:
    return HTTP.post(f"{running.url}{path}", json=body, headers=headers)


def test_a_gateway_does_not_start_before_an_upstream_that_takes_no_salt(upstream: Any, tmp_path: Path) -> None:
    server = upstream(serve("other"))
    with pytest.raises(ConfigurationError, match="shared_upstream"):
        Runtime(settings(server.url, tmp_path)).start()
    with pytest.raises(ValueError, match=r"backends\.up\.shared_upstream"):
        settings(server.url, tmp_path, server_kind="other")


def test_an_upstream_that_cannot_be_recognised_gets_no_request(gateway: Any, upstream: Any, tmp_path: Path) -> None:
    server = upstream(lambda request: request.answer(b"", 500))
    running = gateway({}, settings(server.url, tmp_path))
    response = send(running, authorization="Bearer key-of-alice")
    assert response.status_code == 503 and response.json()["error"]["code"] == "upstream_isolation"
    assert not posted(server)


def test_request_ids_of_tenants_differ_at_an_upstream(gateway: Any, upstream: Any, tmp_path: Path) -> None:
    server = upstream(serve("vllm"))
    running, sent = gateway({}, settings(server.url, tmp_path)), []
    for tenant in ("alice", "bob"):
        headers = {"authorization": f"Bearer key-of-{tenant}", "x-request-id": "r1", "idempotency-key": "k1"}
        headers["x-agentspec-session"] = "s1"
        assert send(running, **headers).headers["x-request-id"] == "r1"
        sent.append([server.requests[-1].headers[name] for name in ("x-request-id", "idempotency-key")])
        session = server.requests[-1].headers["x-agentspec-session"]
        assert session == server.requests[-1].json["vllm_xargs"]["agentspec_session"] and session not in sent[0]
        sent[-1].append(session)
    assert not set(sent[0]) & set(sent[1]) and all(one[0].endswith("-r1") and one[1].endswith("-k1") for one in sent)


CLAUDE = {"x-claude-code-session-id": "s1", "x-claude-code-agent-id": "a1"}
TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=b"}


def asked(server: Any) -> Any:
    return [request for request in server.requests if request.target.endswith("completions")][-1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("owner", "fields", "headers"),
    [
        ("vllm", {"session_id": "s1", "vllm_xargs": {"agentspec_session": "s1", "agentspec_step": "a1"}}, {}),
        ("sglang", {"session_id": "s1"}, {"x-smg-routing-key": "s1"}),
        ("other", {}, {}),
    ],
)
def test_an_upstream_gets_the_session_in_its_own_field(
    gateway: Any, upstream: Any, path: str, owner: str, fields: Any, headers: dict[str, str]
) -> None:
    server = upstream(serve(owner))
    assert send(gateway({}, settings(server.url)), path, **CLAUDE, **TRACE).status_code == 200
    request = asked(server)
    assert request.json == {**BODY, **fields}
    said = {name: value for name, value in request.headers.items() if name.startswith("x-smg")}
    assert said == headers
    assert {name: request.headers[name] for name in TRACE} == TRACE


@pytest.mark.parametrize(("owner", "sent"), [("vllm", 4), ("sglang", -4)])
def test_a_priority_reaches_servers_that_schedule_by_it(gateway: Any, upstream: Any, owner: str, sent: int) -> None:
    server = upstream(serve(owner))
    asking = {**BODY, "priority": 4}
    refused = send(gateway({}, settings(server.url)), body=asking)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    assert "priority of the backend lets clients stand back" in refused.json()["error"]["message"]
    running = gateway({}, settings(server.url, priority="auto"))
    assert send(running, body=asking).status_code == 200 and asked(server).json["priority"] == sent
    assert send(running, body={**BODY, "priority": -1}).status_code == 400
    nested = {**BODY, "nvext": {"agent_hints": {"priority": 9}}}
    assert send(running, body=nested).status_code == 400


def test_names_are_each_tenants_own(gateway: Any, upstream: Any, tmp_path: Path) -> None:
    server = upstream(serve("sglang"))
    running = gateway({}, settings(server.url, tmp_path))
    parents = {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}
    sent = []
    for path in ("/v1/chat/completions", "/v1/messages"):
        for key in ("key-of-alice", "key-of-bob"):
            for given, headers in ((BODY, parents), ({**BODY, "session_id": "s"}, {})):
                assert send(running, path, given, authorization=f"Bearer {key}", **headers).status_code == 200
                request = asked(server)
                name = request.headers["x-smg-routing-key"]
                assert name == request.json["session_id"] and name != "s"
                assert request.headers.get("x-dynamo-parent-session-id", "") not in ("s", "p")
                sent.append((key, name))
    assert len(set(sent)) == 2 and len({name for _, name in sent}) == 2
    odd = send(running, body={**BODY, "session_id": 5}, authorization="Bearer key-of-alice")
    assert odd.status_code == 400 and odd.json()["error"]["param"] == "session_id"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_later_system_messages_get_the_role_user_where_an_upstream_refuses_them(
    gateway: Any, upstream: Any, path: str
) -> None:
    server = upstream(serve("other"))
    said = [{"role": role, "content": role} for role in ("system", "user", "assistant", "system", "user")]
    for setting, roles in (
        ("anywhere", [one["role"] for one in said]),
        ("first", "system user assistant user user".split()),
    ):
        running = gateway({}, settings(server.url, system_messages=setting))
        assert send(running, path, {**BODY, "messages": said}).status_code == 200
        assert [one["role"] for one in asked(server).json["messages"]] == roles
        assert [one["content"] for one in asked(server).json["messages"]] == [one["content"] for one in said]
