"""Cases U1, U2, U3 and U10 with pools: what is tried again, where, how often, and what a client gets in the end."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import FleetSettings, OpenAISettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings

pytestmark = pytest.mark.reliability
CHAT = "/v1/chat/completions"
TRUST = ssl.create_default_context()  # to make one takes long
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANSWER = json.dumps({"choices": [{"index": 0, "message": {"content": "hello"}, "finish_reason": "stop"}]}).encode()
ENDED = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
QUIET = {"server_kind": "other", "probe": False}
Script = Callable[[Any], None]


def pool(
    *urls: str, server: dict[str, Any] | None = None, fleet: dict[str, Any] | None = None, **model: Any
) -> Settings:
    """Settings in which the model `m` is answered by the servers at `urls`, one after the other."""
    names = [f"s{number}" for number in range(len(urls))]
    upstreams = {name: OpenAISettings(base_url=url, **QUIET) for name, url in zip(names, urls, strict=True)}  # type: ignore[arg-type]
    own = ModelSettings(backends=tuple(names), **{"placement": "round_robin", **model})
    return Settings(
        server=ServerSettings(**server or {}), backends=upstreams, models={"m": own}, fleet=FleetSettings(**fleet or {})
    )


def post(running: Any, **fields: Any) -> httpx.Response:
    return httpx.post(f"{running.url}{CHAT}", json={**BODY, **fields}, timeout=60, verify=TRUST)


def says(text: str) -> Script:
    return lambda request: request.answer(ANSWER.replace(b"hello", text.encode()))


def refuses(status: int, body: bytes = b'{"error": {"message": "no"}}', **headers: str) -> Script:
    return lambda request: request.answer(body, status, **headers)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_u1_a_refusal_keeps_its_words_when_nobody_else_takes_the_call(gateway: Any, upstream: Any, path: str) -> None:
    busy = refuses(429, b'{"message": "slow down, please"}', retry_after_ms="20")
    running = gateway({}, pool(upstream(busy).url))
    response = httpx.post(f"{running.url}{path}", json={**BODY, "max_tokens": 5}, timeout=60, verify=TRUST)
    assert response.status_code == 429 and "slow down, please" in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_u10_with_every_breaker_open_calls_fail_at_once_and_say_when_to_come_back(gateway: Any, upstream: Any) -> None:
    failing = upstream(refuses(503))
    running = gateway({}, pool(failing.url, fleet={"max_retries": 0}))
    assert [post(running).status_code for _ in range(5)] == [503] * 5
    response = post(running)
    assert response.status_code == 503 and response.json()["error"]["code"] == "no_server_available"
    assert 1 <= int(response.headers["retry-after"]) <= 10 and len(failing.requests) == 5


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_u10_a_server_that_errs_is_left_out_whatever_route_finds_it_out(gateway: Any, upstream: Any, path: str) -> None:
    """By an event of its stream; statuses and cuts are among the faults of tests/backends/pool."""

    def failing(request: Any) -> None:
        request.head()
        request.send(b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n')
        request.send(b'data: {"error": {"message": "the engine is gone", "code": 500}}\n\n')

    def well(request: Any) -> None:
        request.head()
        request.send(ENDED)

    bad, good = upstream(failing), upstream(well)
    running = gateway({}, pool(bad.url, good.url))
    body = {**BODY, "max_tokens": 5, "stream": True}
    for _ in range(30):
        httpx.post(f"{running.url}{path}", json=body, timeout=60, verify=TRUST)
    assert (
        5 <= len(bad.requests) <= 10
        and {one.member: one.state for one in running.runtime.fleet.samples()}["s0"] == "erring"
    )
