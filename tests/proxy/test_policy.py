"""What upstreams make of policies and switches that headers ask for."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agentspec.cache.settings import CacheSettings
from agentspec.testing import FakeBackend
from tests.proxy.upstreams import HTTP, chats, posted, scripted, settings

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}
ANSWER = b'{"choices": [{"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}], "usage": null}'


def ask(running: Any, headers: dict[str, str], route: str = CHAT, **fields: Any) -> httpx.Response:
    return HTTP.post(f"{running.url}{route}", json={"model": "m", **ROUTES[route], **fields}, headers=headers)


def test_a_local_model_serves_by_the_policy(gateway: Any) -> None:
    fake = FakeBackend("hi")
    running = gateway({"m": fake})
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
    running = gateway({"m": FakeBackend("hi")})
    for header, (value, said) in WRONG.items():
        answer = ask(running, {header: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == header.lower() and said in answer.text


def test_store_off_holds_for_a_chat_that_an_upstream_would_store(gateway: Any, upstream: Any) -> None:
    server = upstream(lambda request: request.answer(b"{}"))
    running = gateway({}, settings(server.url))
    for headers in ({"x-agentspec-store": "off"}, {}):
        assert ask(running, headers, store=True).status_code == 200
    assert [request.json["store"] for request in posted(server)] == [False, True]


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/responses"])
def test_a_translated_request_has_its_priority(gateway: Any, upstream: Any, route: str) -> None:
    server = upstream(chats(lambda request: request.answer(ANSWER)))
    running = gateway({}, settings(server.url, priority="highest_first"))
    assert ask(running, {"x-agentspec-priority": "4"}, route).status_code == 200
    assert [request.json["priority"] for request in posted(server, CHAT)] == [-4]


OFF = {"agentspec_store": "off", "agentspec_speculation": "off"}
SWITCHED = {"x-agentspec-store": "off", "x-agentspec-speculation": "off"}


def all_routes(owner: str) -> Any:
    return scripted(lambda request: request.answer(ANSWER), "/v1/", owner)


def sent(server: Any) -> list[Any]:
    """What each request sent the drafter, in either field."""
    bodies = [request.json for request in posted(server)]
    return [body.get("vllm_xargs", body.get("custom_params")) for body in bodies]


@pytest.mark.parametrize(("owner", "expected"), [("vllm", OFF), ("sglang", OFF), ("other", None)])
def test_switches_reach_servers_with_our_drafter(gateway: Any, upstream: Any, owner: str, expected: Any) -> None:
    server = upstream(all_routes(owner))
    running = gateway({}, settings(server.url))
    for route in ROUTES:
        for headers in (SWITCHED, {}):
            ask(running, headers, route)
    assert sent(server) == [expected, None] * len(ROUTES)


def test_a_gateway_that_stores_nothing_asks_its_servers_to_store_nothing(gateway: Any, upstream: Any) -> None:
    server = upstream(all_routes("vllm"))
    stores_nothing = settings(server.url).model_copy(update={"cache": CacheSettings(store=False)})
    ask(gateway({}, stores_nothing), {})
    assert sent(server) == [{"agentspec_store": "off"}]
