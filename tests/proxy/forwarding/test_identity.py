"""What agents say about themselves, through the gateway: read as labels, and told to each upstream in its words."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ApiKey, ServerSettings
from agentspec.testing import FakeBackend
from agentspec.types import Labels

BODY = {"model": "up", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
CLAUDE = {"x-claude-code-session-id": "s1", "x-claude-code-agent-id": "a1"}
TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=b"}


def post(running: Any, path: str = "/v1/chat/completions", body: Any = BODY, **headers: str) -> httpx.Response:
    return httpx.post(f"{running.url}{path}", json=body, headers=headers, timeout=60)


def serve(owner: str) -> Any:
    def script(request: Any) -> None:
        if request.method == "GET":
            request.answer(json.dumps({"data": [{"id": "x", "owned_by": owner}]}).encode())
        elif request.target.endswith("completions"):
            request.answer(b'{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}')
        else:
            request.answer(b"{}", 404)

    return script


def through(url: str, server: ServerSettings | None = None, **backend: Any) -> Settings:
    up = OpenAISettings(base_url=url, **backend)  # type: ignore[arg-type]
    return Settings(server=server or ServerSettings(), backends={"up": up}, models={"up": ModelSettings(backend="up")})


def asked(server: Any) -> Any:
    return [request for request in server.requests if request.target.endswith("completions")][-1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_local_model_is_told_the_labels(gateway: Any, path: str) -> None:
    backend = FakeBackend(lambda request: "ok")
    running = gateway({"up": backend})
    post(running, path, **CLAUDE)
    post(running, path, **CLAUDE, **{"x-agentspec-session": "mine"})
    post(running, path, {**BODY, "session_id": "s2"})
    post(running, path, {**BODY, "metadata": {"user_id": "u"}})
    found = [request.labels for request in backend.requests]
    assert found == [Labels("s1", None, "a1"), Labels("mine", None, "a1"), Labels("s2"), Labels("u")]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("owner", "settings", "fields", "headers"),
    [
        ("vllm", {}, {"session_id": "s1", "vllm_xargs": {"agentspec_session": "s1", "agentspec_step": "a1"}}, {}),
        ("sglang", {}, {"session_id": "s1"}, {"x-smg-routing-key": "s1"}),
        ("somebody", {}, {}, {}),
        ("somebody", {"server_kind": "dynamo"}, {}, {"x-dynamo-session-id": "s1"}),
    ],
)
def test_an_upstream_is_told_in_its_words(
    gateway: Any, upstream: Any, path: str, owner: str, settings: Any, fields: Any, headers: dict[str, str]
) -> None:
    server = upstream(serve(owner))
    assert post(gateway({}, through(server.url, **settings)), path, **CLAUDE, **TRACE).status_code == 200
    request = asked(server)
    assert request.json == {**BODY, **fields}
    said = {name: value for name, value in request.headers.items() if name.startswith(("x-smg", "x-dynamo"))}
    assert said == headers
    assert {name: request.headers[name] for name in TRACE} == TRACE


def test_dynamo_is_told_of_parents_and_ends(gateway: Any, upstream: Any) -> None:
    server = upstream(serve("somebody"))
    running = gateway({}, through(server.url, server_kind="dynamo", priority="auto"))
    said = {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p", "x-dynamo-session-final": "true"}
    post(running, body={**BODY, "priority": 4}, **said)
    request = asked(server)
    assert {name: request.headers[name] for name in said} == said
    assert request.json["nvext"] == {"agent_hints": {"priority": -4}} and request.json["priority"] is None


@pytest.mark.parametrize(("owner", "sent"), [("vllm", 4), ("sglang", -4)])
def test_a_priority_reaches_servers_that_schedule_by_it(gateway: Any, upstream: Any, owner: str, sent: int) -> None:
    server = upstream(serve(owner))
    asking = {**BODY, "priority": 4}
    refused = post(gateway({}, through(server.url)), body=asking)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    assert "priority of the backend lets clients stand back" in refused.json()["error"]["message"]
    running = gateway({}, through(server.url, priority="auto"))
    assert post(running, body=asking).status_code == 200 and asked(server).json["priority"] == sent
    assert post(running, body={**BODY, "priority": -1}).status_code == 400
    nested = {**BODY, "nvext": {"agent_hints": {"priority": 9}}}
    assert post(running, body=nested).status_code == 400


def test_names_are_each_tenants_own(gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_A", "aaa")
    monkeypatch.setenv("KEY_B", "bbb")
    keys = ApiKey(tenant="a", key_env="KEY_A"), ApiKey(tenant="b", key_env="KEY_B")
    server = upstream(serve("sglang"))
    running = gateway({}, through(server.url, ServerSettings(api_keys=keys)))
    parents = {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"}
    told = []
    for path in ("/v1/chat/completions", "/v1/messages"):
        for key in ("aaa", "bbb"):
            for given, headers in ((BODY, parents), ({**BODY, "session_id": "s"}, {})):
                assert post(running, path, given, authorization=f"Bearer {key}", **headers).status_code == 200
                request = asked(server)
                name = request.headers["x-smg-routing-key"]
                assert name == request.json["session_id"] and name != "s"
                assert request.headers.get("x-dynamo-parent-session-id", "") not in ("s", "p")
                told.append((key, name))
    assert len(set(told)) == 2 and len({name for _, name in told}) == 2
    odd = post(running, body={**BODY, "session_id": 5}, authorization="Bearer aaa")
    assert odd.status_code == 400 and odd.json()["error"]["param"] == "session_id"
