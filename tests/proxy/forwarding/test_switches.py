"""What is switched off for a request reaches the drafters inside vLLM and SGLang, by whichever route it came."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.cache.settings import CacheSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.types import GenerateRequest

OFF = {"agentspec_store": "off", "agentspec_speculation": "off"}
SWITCHED = {"x-agentspec-store": "off", "x-agentspec-speculation": "off"}
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}
CHAT = b'{"choices": [{"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}], "usage": null}'


def serve(owner: str) -> Any:
    """A server of this kind that has every route."""

    def script(request: Any) -> None:
        models = json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode()
        request.answer(CHAT if request.body else models, 400 if request.body == b"{}" else 200)

    return script


def in_front_of(url: str, *, store: bool = True, **options: Any) -> Settings:
    up = OpenAISettings(base_url=url, **options)  # type: ignore[arg-type]
    cache = CacheSettings(path=None, store=store)
    return Settings(backends={"up": up}, models={"m": ModelSettings(backend="up")}, cache=cache)


def told(server: Any) -> list[Any]:
    """What each request told the drafter, in either field."""
    bodies = [request.json for request in server.requests if request.method == "POST" and request.body != b"{}"]
    return [body.get("vllm_xargs", body.get("custom_params")) for body in bodies]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("owner", "expected"), [("vllm", OFF), ("sglang", OFF), ("somebody", None)])
def test_a_server_with_a_drafter_of_its_own_is_told(
    gateway: Any, upstream: Any, route: str, owner: str, expected: Any
) -> None:
    server = upstream(serve(owner))
    running = gateway({}, in_front_of(server.url))
    for headers in (SWITCHED, {}):
        httpx.post(f"{running.url}{route}", json={"model": "m", **ROUTES[route]}, headers=headers, timeout=60)
    assert told(server) == [expected, None]


@pytest.mark.parametrize(("field", "owner"), [("vllm_xargs", "vllm"), ("custom_params", "sglang")])
def test_it_is_told_beside_what_the_client_says_and_comes_first(
    gateway: Any, upstream: Any, field: str, owner: str
) -> None:
    server = upstream(serve(owner))
    running = gateway({}, in_front_of(server.url, allow_fields=("custom_params",)))
    given = {"a": 1, "agentspec_store": "on"}
    body = {"model": "m", "messages": MESSAGES, field: given}
    httpx.post(f"{running.url}/v1/chat/completions", json=body, headers={"x-agentspec-store": "off"}, timeout=60)
    assert told(server) == [{"a": 1, "agentspec_store": "off"}]


def test_a_gateway_that_stores_nothing_asks_its_servers_to_store_nothing(gateway: Any, upstream: Any) -> None:
    server = upstream(serve("vllm"))
    running = gateway({}, in_front_of(server.url, store=False))
    httpx.post(f"{running.url}/v1/chat/completions", json={"model": "m", "messages": MESSAGES}, timeout=60)
    assert told(server) == [{"agentspec_store": "off"}]


@pytest.mark.anyio
async def test_calls_in_process_tell_it_too(upstream: Any) -> None:
    server = upstream(serve("vllm"))
    async with Runtime(in_front_of(server.url)) as runtime:
        request = GenerateRequest(model="m", messages=MESSAGES, store=False, speculation=False)
        assert [delta.text async for delta in runtime.generate(request)] == ["ok"]
    assert told(server) == [OFF]
