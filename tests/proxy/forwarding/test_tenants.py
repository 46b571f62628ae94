"""A gateway of two tenants in front of one upstream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ApiKey, ServerSettings

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def settings(url: str, folder: Path, **backend: Any) -> Settings:
    for tenant in ("alice", "bob"):
        (folder / tenant).write_text(f"key-of-{tenant}")
    keys = tuple(ApiKey(tenant=tenant, key_file=folder / tenant) for tenant in ("alice", "bob"))
    up = OpenAISettings(base_url=url, **backend)  # type: ignore[arg-type]
    return Settings(
        server=ServerSettings(api_keys=keys), backends={"up": up}, models={"m": ModelSettings(backend="up")}
    )


def serve(owner: str) -> Any:
    def script(request: Any) -> None:
        models = json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode()
        request.answer(models if request.target == "/v1/models" else b'{"choices": []}')

    return script


def ask(running: Any, tenant: str, **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer key-of-{tenant}", "x-agentspec-session": "s1"}
    return httpx.post(f"{running.url}/v1/chat/completions", json={**BODY, **fields}, headers=headers, timeout=60)


def test_each_tenants_requests_carry_a_salt_of_its_own(gateway: Any, upstream: Any, tmp_path: Path) -> None:
    server = upstream(serve("vllm"))
    running = gateway({}, settings(server.url, tmp_path))
    for tenant in ("alice", "bob", "alice"):
        assert ask(running, tenant, cache_salt="raw").status_code == 200
    sent = [request.json for request in server.requests if request.method == "POST"]
    assert sent[0] == sent[2] and sent[0]["cache_salt"] != sent[1]["cache_salt"]
    assert {len(body["cache_salt"]) for body in sent} == {64}
    assert sent[0]["vllm_xargs"]["agentspec_session"] != sent[1]["vllm_xargs"]["agentspec_session"]
    refused = ask(running, "alice", cache_salt=5)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"


def test_a_gateway_does_not_start_before_an_upstream_that_takes_no_salt(upstream: Any, tmp_path: Path) -> None:
    server = upstream(serve("somebody"))
    with pytest.raises(ConfigurationError, match="shared_upstream"):
        Runtime(settings(server.url, tmp_path)).start()
    with pytest.raises(ValueError, match=r"backends\.up\.shared_upstream"):
        settings(server.url, tmp_path, server_kind="other")


def test_it_starts_if_the_operator_lets_them_share(gateway: Any, upstream: Any, tmp_path: Path) -> None:
    server = upstream(serve("somebody"))
    running = gateway({}, settings(server.url, tmp_path, shared_upstream=True))
    assert ask(running, "alice").status_code == 200
    assert server.requests[-1].json == BODY


def test_an_upstream_that_cannot_be_recognised_gets_no_request(gateway: Any, upstream: Any, tmp_path: Path) -> None:
    server = upstream(lambda request: request.answer(b"", 500))
    running = gateway({}, settings(server.url, tmp_path))
    response = ask(running, "alice")
    assert response.status_code == 503 and response.json()["error"]["code"] == "upstream_isolation"
    assert not [request for request in server.requests if request.method == "POST"]


def test_nobody_sends_another_tenants_request_id(gateway: Any, upstream: Any, tmp_path: Path) -> None:
    server = upstream(serve("vllm"))
    running, sent = gateway({}, settings(server.url, tmp_path)), []
    for tenant in ("alice", "bob"):
        headers = {"authorization": f"Bearer key-of-{tenant}", "x-request-id": "r1", "idempotency-key": "k1"}
        headers["x-agentspec-session"] = "s1"
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=BODY, headers=headers, timeout=60)
        assert answer.headers["x-request-id"] == "r1"
        sent.append([server.requests[-1].headers[name] for name in ("x-request-id", "idempotency-key")])
        session = server.requests[-1].headers["x-agentspec-session"]
        assert session == server.requests[-1].json["vllm_xargs"]["agentspec_session"] and session not in sent[0]
        sent[-1].append(session)
    assert not set(sent[0]) & set(sent[1]) and all(one[0].endswith("-r1") and one[1].endswith("-k1") for one in sent)


def test_a_sole_tenants_ids_pass_as_they_are(gateway: Any, upstream: Any, tmp_path: Path) -> None:
    server = upstream(serve("vllm"))
    both = settings(server.url, tmp_path)
    running = gateway({}, both.model_copy(update={"server": ServerSettings(api_keys=both.server.api_keys[:1])}))
    headers = {"authorization": "Bearer key-of-alice", "x-request-id": "r1", "x-agentspec-session": "s1"}
    httpx.post(f"{running.url}/v1/chat/completions", json=BODY, headers=headers, timeout=60)
    assert {name: server.requests[-1].headers[name] for name in headers if name != "authorization"} == {
        "x-request-id": "r1",
        "x-agentspec-session": "s1",
    }
