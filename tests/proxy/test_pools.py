"""Pools behind a gateway: every route, every tenant, and the operator's view."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import FleetSettings, OpenAISettings
from agentspec.reasoning.settings import STRATEGIES
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings

CHAT = "/v1/chat/completions"
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
ANSWER = json.dumps({"choices": [CHOICE], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode()
REFUSED = b'{"error": {"message": "no"}}'


def working(request: Any) -> None:
    """A server that answers whatever it is asked."""
    known: dict[str, bytes] = {
        "/v1/models": b'{"data": [{"id": "m", "owned_by": "vllm"}]}',
        "/v1/embeddings": b'{"data": [{"embedding": [1.0]}]}',
        "/tokenize": b'{"count": 1, "tokens": [7]}',
        "/v1/rerank": b'{"results": []}',
    }
    request.answer(known.get(request.target, ANSWER))


def broken(request: Any) -> None:
    """One that says that it is vLLM, and then answers nothing."""
    if request.target == "/v1/models":
        working(request)
    else:
        request.answer(REFUSED, 503)


def backends(*urls: str, **given: Any) -> dict[str, OpenAISettings]:
    options = {"probe": False, **given}
    return {f"s{number}": OpenAISettings(base_url=url, **options) for number, url in enumerate(urls)}  # type: ignore[arg-type]


def pooled(*urls: str, server: dict[str, Any] | None = None, **given: Any) -> Settings:
    upstreams = backends(*urls, **given)
    model = ModelSettings(backends=tuple(upstreams), placement="round_robin")
    return Settings(server=ServerSettings(**server or {}), backends=upstreams, models={"m": model})


def posts(server: Any, path: str = CHAT) -> list[Any]:
    return [request for request in server.requests if request.method == "POST" and request.target == path]


@pytest.mark.parametrize(
    ("path", "body", "sent"),
    [
        (CHAT, BODY, CHAT),
        ("/v1/completions", {"model": "m", "prompt": "hi"}, "/v1/completions"),
        ("/v1/embeddings", {"model": "m", "input": "hi"}, "/v1/embeddings"),
        ("/v1/messages", {**BODY, "max_tokens": 5}, CHAT),
        ("/v1/responses", {"model": "m", "input": "hi"}, CHAT),
        ("/tokenize", {"model": "m", "prompt": "hi"}, "/tokenize"),
        ("/v1/messages/count_tokens", BODY, "/tokenize"),
    ],
)
def test_every_route_leaves_a_broken_server_for_another(
    gateway: Any, upstream: Any, path: str, body: dict[str, Any], sent: str
) -> None:
    """Each server sees the same request, made for it."""
    servers = [upstream(broken), upstream(working)]
    running = gateway({}, pooled(*(one.url for one in servers)))
    assert [HTTP.post(f"{running.url}{path}", json=body).status_code for _ in range(2)] == [
        200,
        200,
    ]
    first, second = (posts(one, sent) for one in servers)
    assert len(first) == 1 and len(second) == 2 and first[0].body == second[0].body


def test_each_member_gets_the_salts_and_labels_of_its_own_kind(
    gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a call comes to it after another one has refused it."""
    keys = [{"tenant": name, "key_env": f"KEY_{name}"} for name in "tu"]
    for name in "tu":
        monkeypatch.setenv(f"KEY_{name}", f"key-of-{name}")

    def owner(name: str, then: Callable[[Any], None]) -> Callable[[Any], None]:
        listed = json.dumps({"data": [{"id": "m", "owned_by": name}]}).encode()
        return lambda request: request.answer(listed) if request.target == "/v1/models" else then(request)

    refusing = owner("vllm", lambda request: request.answer(REFUSED, 503))
    servers = [upstream(refusing), upstream(owner("sglang", lambda request: request.answer(ANSWER)))]
    settings = pooled(*(one.url for one in servers), server={"api_keys": keys}, allow_fields=["extra_key"])
    running = gateway({}, settings)
    salts = []
    for name in "tu":
        headers = {"authorization": f"Bearer key-of-{name}", "x-agentspec-session": "s"}
        sent = {**BODY, "extra_key": "mine"}
        assert HTTP.post(f"{running.url}{CHAT}", json=sent, headers=headers).status_code == 200
        body = posts(servers[1])[-1].json
        salts.append(body["cache_salt"])
        assert body["extra_key"] is None and "vllm_xargs" not in body and body["session_id"] != "s"
    first = posts(servers[0])[0].json
    assert len(set(salts)) == 2 and first["extra_key"] == "mine" and first["cache_salt"] not in salts
    assert first["vllm_xargs"]["agentspec_session"] != "s"


def test_one_backend_with_several_servers_takes_any_model_and_lists_its_own(gateway: Any, upstream: Any) -> None:
    servers = [upstream(working), upstream(working)]
    urls = [one.url for one in servers]
    only = OpenAISettings(base_urls=urls, probe=False)  # type: ignore[arg-type]
    running = gateway({}, Settings(backends={"up": only}))
    answers = [HTTP.post(f"{running.url}{CHAT}", json={**BODY, "model": "any"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [model["id"] for model in HTTP.get(f"{running.url}/v1/models").json()["data"]] == ["m"]
    assert {posts(one)[0].json["model"] for one in servers if posts(one)} == {"any"}


def test_a_strategy_asks_a_pool_as_it_asks_a_server(gateway: Any, upstream: Any) -> None:
    def continuing(request: Any) -> None:
        """The prompt of a message that is continued is shorter."""
        if request.target != CHAT:
            return working(request)
        tokens = 1 if request.json.get("continue_final_message") else 2
        usage = {"prompt_tokens": tokens, "completion_tokens": 1}
        return request.answer(json.dumps({"choices": [CHOICE], "usage": usage}).encode())

    def refusing_chats(request: Any) -> None:
        (broken if request.target == CHAT else working)(request)

    servers = [upstream(refusing_chats), upstream(continuing)]
    upstreams = backends(*(one.url for one in servers), model="m")
    strategy = STRATEGIES["specreason"].model_validate({"strategy": "specreason", "base": "m", "small": "m"})
    models = {"m": ModelSettings(backends=tuple(upstreams), placement="round_robin"), "fast": strategy}
    running = gateway({}, Settings(backends=upstreams, models=models))
    response = HTTP.post(f"{running.url}{CHAT}", json={**BODY, "model": "fast", "max_tokens": 8})
    assert response.status_code == 200 and response.json()["choices"][0]["message"]["content"]
    counted = HTTP.post(f"{running.url}/v1/messages/count_tokens", json={**BODY, "model": "fast"})
    assert counted.json() == {"input_tokens": 1}


def test_operators_see_the_servers_and_tenants_do_not(
    gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENANT", "a-tenants-key")
    monkeypatch.setenv("OPERATOR", "an-operators-key")
    keys = [{"tenant": "t", "key_env": "TENANT"}, {"role": "operator", "key_env": "OPERATOR"}]
    running = gateway({}, pooled(upstream(working).url, upstream(working).url, server={"api_keys": keys}))
    tenant = {"authorization": "Bearer a-tenants-key"}
    assert HTTP.get(f"{running.url}/fleet", headers=tenant).status_code == 403
    for _ in range(4):
        HTTP.post(f"{running.url}{CHAT}", headers=tenant, json=BODY)
    operator = {"authorization": "Bearer an-operators-key"}
    shown = HTTP.get(f"{running.url}/fleet", headers=operator).json()["members"]
    assert [(one["member"], one["state"], one["calls"]) for one in shown] == [("s0", "ready", 2), ("s1", "ready", 2)]


def test_metrics_count_by_member(gateway: Any, upstream: Any) -> None:
    servers = [upstream(broken), upstream(working)]
    settings = pooled(*(one.url for one in servers))
    running = gateway({}, settings.model_copy(update={"fleet": FleetSettings(failures=2)}))
    for _ in range(8):
        HTTP.post(f"{running.url}{CHAT}", json=BODY)

    def metric(name: str, member: str, **labels: str) -> float:
        found: float = running.metric(f"agentspec_member_{name}", backend=member, member=member, **labels)
        return found

    assert (metric("calls_total", "s0"), metric("failures_total", "s0")) == (2, 2)
    assert (metric("calls_total", "s1"), metric("retries_total", "s1"), metric("failures_total", "s1")) == (8, 2, 0)
    assert metric("state", "s0", state="open") == 1 and metric("state", "s1", state="ready") == 1
    assert metric("in_flight", "s1") == 0


def test_the_servers_behind_another_gateway_stay_its_own_business(gateway: Any, upstream: Any) -> None:
    behind = gateway({}, pooled(upstream(working).url))
    answer = HTTP.post(f"{behind.url}{CHAT}", json=BODY)
    assert answer.headers["x-agentspec-member"] == "s0"
    front = Settings(backends={"up": OpenAISettings(base_url=f"{behind.url}/v1")})  # type: ignore[arg-type]
    assert "x-agentspec-member" not in HTTP.post(f"{gateway({}, front).url}{CHAT}", json=BODY).headers


def test_a_client_that_leaves_while_its_call_waits_for_a_server_ends_the_call(
    gateway: Any, upstream: Any, hanging_up: Any, until: Any
) -> None:
    busy = upstream(lambda request: request.answer(REFUSED, 429, retry_after="60"))
    running = gateway({}, pooled(busy.url, server_kind="other"))
    with hanging_up(running.url, BODY):
        until(lambda: running.runtime.fleet.samples()[0].state == "busy")
    cancelled = {"route": CHAT, "model": "m", "outcome": "cancelled"}
    until(lambda: running.metric("agentspec_requests_total", **cancelled) == 1)
    [sample] = running.runtime.fleet.samples()
    assert (sample.in_flight, sample.calls, sample.state) == (0, 1, "busy")
