"""What upstreams make of policies and switches that headers ask for."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.cache.settings import CacheSettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.testing import FakeBackend

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def ask(running: Any, headers: dict[str, str], **fields: Any) -> httpx.Response:
    body = {"model": "fake", "messages": MESSAGES, **fields}
    return httpx.post(f"{running.url}{CHAT}", json=body, headers=headers, timeout=60)


def test_a_local_model_serves_by_the_policy(gateway: Any) -> None:
    fake = FakeBackend("hi")
    running = gateway({"fake": fake})
    asked = {"x-agentspec-priority": "2", "x-agentspec-deadline-s": "3"}
    assert ask(running, asked).status_code == 200
    assert ask(running, asked, priority=7).status_code == 200
    first, second = fake.requests
    assert (first.priority, first.deadline_s, second.priority) == (2, 3, 7)  # the body comes first
    assert ask(running, asked, priority=0).status_code == 200 and fake.requests[-1].priority == 0


WRONG = {
    "x-agentspec-priority": ("-1", "x-agentspec-priority"),
    "x-agentspec-deadline-s": ("-1", "x-agentspec-deadline-s"),
    "X-Agentspec-Stor": ("off", "did you mean 'x-agentspec-store'?"),
}


def test_a_header_that_asks_for_nothing_known_is_refused(gateway: Any) -> None:
    running = gateway({"fake": FakeBackend("hi")})
    for header, (value, said) in WRONG.items():
        answer = ask(running, {header: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == header.lower() and said in answer.text


def upstream_settings(url: str, **options: Any) -> Settings:
    up = OpenAISettings(base_url=url, **options)  # type: ignore[arg-type]
    return Settings(backends={"up": up}, models={"fake": ModelSettings(backend="up")})


def test_store_off_holds_for_a_chat_that_an_upstream_would_store(gateway: Any, upstream: Any) -> None:
    server = upstream(lambda request: request.answer(b"{}"))
    running = gateway({}, upstream_settings(server.url))
    for headers in ({"x-agentspec-store": "off"}, {}):
        assert ask(running, headers, store=True).status_code == 200
    assert [request.json["store"] for request in server.requests if request.method == "POST"] == [False, True]


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/responses"])
def test_a_translated_request_has_its_priority(gateway: Any, upstream: Any, route: str) -> None:
    answer = b'{"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}'
    server = upstream(lambda request: request.answer(answer, status=200 if request.target == CHAT else 404))
    running = gateway({}, upstream_settings(server.url, priority="highest_first"))
    body: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "max_tokens": 5}
    if route == "/v1/responses":
        body = {"model": "fake", "input": "hi"}
    asked = httpx.post(f"{running.url}{route}", json=body, headers={"x-agentspec-priority": "4"}, timeout=60)
    assert asked.status_code == 200
    assert [request.json["priority"] for request in server.requests if request.target == CHAT] == [-4]


OFF = {"agentspec_store": "off", "agentspec_speculation": "off"}
SWITCHED = {"x-agentspec-store": "off", "x-agentspec-speculation": "off"}
ROUTES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}
CHATS = b'{"choices": [{"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}], "usage": null}'


def serve(owner: str) -> Any:
    """A server of this kind that has every route."""

    def script(request: Any) -> None:
        models = json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode()
        request.answer(CHATS if request.body else models, 400 if request.body == b"{}" else 200)

    return script


def in_front_of(url: str, *, store: bool = True, **options: Any) -> Settings:
    up = OpenAISettings(base_url=url, **options)  # type: ignore[arg-type]
    cache = CacheSettings(path=None, store=store)
    return Settings(backends={"up": up}, models={"m": ModelSettings(backend="up")}, cache=cache)


def sent(server: Any) -> list[Any]:
    """What each request sent the drafter, in either field."""
    bodies = [request.json for request in server.requests if request.method == "POST" and request.body != b"{}"]
    return [body.get("vllm_xargs", body.get("custom_params")) for body in bodies]


@pytest.mark.parametrize(("owner", "expected"), [("vllm", OFF), ("sglang", OFF), ("other", None)])
def test_switches_reach_servers_with_our_drafter(gateway: Any, upstream: Any, owner: str, expected: Any) -> None:
    server = upstream(serve(owner))
    running = gateway({}, in_front_of(server.url))
    for route, body in ROUTES.items():
        for headers in (SWITCHED, {}):
            httpx.post(f"{running.url}{route}", json={"model": "m", **body}, headers=headers, timeout=60)
    assert sent(server) == [expected, None] * len(ROUTES)


def test_a_gateway_that_stores_nothing_asks_its_servers_to_store_nothing(gateway: Any, upstream: Any) -> None:
    server = upstream(serve("vllm"))
    running = gateway({}, in_front_of(server.url, store=False))
    httpx.post(f"{running.url}/v1/chat/completions", json={"model": "m", "messages": MESSAGES}, timeout=60)
    assert sent(server) == [{"agentspec_store": "off"}]
