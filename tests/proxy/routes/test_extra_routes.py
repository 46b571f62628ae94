from __future__ import annotations

from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError
from agentspec.proxy.app import create_app
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ApiKey, ServerSettings

ROUTES = ("/v1/rerank", "/score")


def settings(url: str, server: dict[str, Any] | None = None, **backend: Any) -> Settings:
    up = OpenAISettings(base_url=url, **backend)  # type: ignore[arg-type]
    models: Any = {"m": ModelSettings(backend="up", upstream_model="org/m")}
    listed = ServerSettings(extra_routes=ROUTES, **(server or {}))
    return Settings(server=listed, backends={"up": up}, models=models)


def pooled(
    urls: list[str], server: dict[str, Any] | None = None, upstream_model: str | None = None, **backend: Any
) -> Settings:
    up = OpenAISettings(base_urls=urls, **{"probe": False, **backend})  # type: ignore[arg-type]
    models: Any = {"m": ModelSettings(backend="up", upstream_model=upstream_model)}
    listed = ServerSettings(extra_routes=ROUTES, **(server or {}))
    return Settings(server=listed, backends={"up": up}, models=models)


def post(url: str, body: bytes, **headers: str) -> httpx.Response:
    return httpx.post(url, content=body, headers={"content-type": "application/json", **headers}, timeout=60)


def test_listed_routes_pass_byte_for_byte(gateway: Any, upstream: Any) -> None:
    server = upstream(lambda request: request.answer(b' {"ok":1.10}'))
    running = gateway({}, settings(server.url, api_key="k"))
    for path in ROUTES:
        assert post(f"{running.url}{path}", b'{"query":"a",  "top_p":1.10}').content == b' {"ok":1.10}'
    post(f"{running.url}/v1/rerank", b'{"model" : "m","query":"a"}')
    assert [request.target for request in server.requests] == ["/v1/rerank", "/score", "/v1/rerank"]
    assert [request.body for request in server.requests[1:]] == [
        b'{"query":"a",  "top_p":1.10}',
        b'{"model":"org/m","query":"a"}',
    ]
    assert server.requests[0].headers["authorization"] == "Bearer k"
    assert httpx.get(f"{running.url}/score").status_code == 405
    assert post(f"{running.url}/v1/other", b"{}").status_code == 404


def test_all_limits_hold(gateway: Any, upstream: Any) -> None:
    server = upstream(lambda request: request.answer(b"{}"))
    url = f"{gateway({}, settings(server.url, {'max_body_bytes': 1000})).url}/v1/rerank"
    assert post(url, b'{"api_base":"http://10.0.0.1"}').status_code == 400
    assert post(url, b'{"documents":["' + b"x" * 1000 + b'"]}').status_code == 413
    assert post(url, b"[]").status_code == 400 and post(url, b'{"model":"no"}').status_code == 404
    assert post(url, b"{}", **{"content-type": "text/plain"}).status_code == 400
    for name, value in (("x-agentspec-stor", "off"), ("x-agentspec-store", "no")):
        assert post(url, b"{}", **{name: value}).json()["error"]["param"] == name
    assert not server.requests


def test_several_tenants_need_a_shared_upstream(gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_A", "aaa")
    monkeypatch.setenv("KEY_B", "bbb")
    keys = {"api_keys": (ApiKey(tenant="a", key_env="KEY_A"), ApiKey(tenant="b", key_env="KEY_B"))}
    server = upstream(lambda request: request.answer(b"{}"))
    apart, shared = (settings(server.url, keys, server_kind="vllm"), settings(server.url, keys, shared_upstream=True))
    refused = post(f"{gateway({}, apart).url}/v1/rerank", b"{}", authorization="Bearer aaa")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "upstream_isolation")
    url = f"{gateway({}, shared).url}/v1/rerank"
    assert post(url, b"{}", authorization="Bearer aaa").status_code == 200
    assert post(url, b"{}").status_code == 401


def test_a_refusal_of_tenants_closes_no_server_of_a_pool(
    gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_A", "aaa")
    monkeypatch.setenv("KEY_B", "bbb")
    keys = (ApiKey(tenant="a", key_env="KEY_A"), ApiKey(tenant="b", key_env="KEY_B"))
    servers = [upstream(lambda request: request.answer(b"{}")) for _ in range(2)]
    running = gateway({}, pooled([one.url for one in servers], {"api_keys": keys}, server_kind="vllm"))
    for _ in range(6):
        refused = post(f"{running.url}/v1/rerank", b"{}", authorization="Bearer aaa")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "upstream_isolation")
    assert [(one.state, one.calls, one.failures) for one in running.runtime.fleet.samples()] == [("ready", 0, 0)] * 2
    assert not any(request.target == "/v1/rerank" for one in servers for request in one.requests)


def test_models_with_several_servers_are_served_under_their_names(gateway: Any, upstream: Any) -> None:
    server = upstream(lambda request: request.answer(b"{}"))
    own = {"probe": False, "server_kind": "other"}
    several = pooled([server.url], upstream_model="org/m", **own)
    alone = OpenAISettings(base_url=server.url, **own)  # type: ignore[arg-type]
    listed = ModelSettings(backends=("up",), upstream_model="org/m")
    one = Settings(server=several.server, backends={"up": alone}, models={"m": listed})
    for given in (several, one):
        assert post(f"{gateway({}, given).url}/v1/rerank", b'{"model":"m"}').status_code == 200
        assert server.requests[-1].body == b'{"model":"org/m"}'


def test_routes_need_one_upstream_and_plain_paths() -> None:
    for wrong in ("v1/rerank", "/v1/../x", "/a//b", "/{path}", "/a?b"):
        with pytest.raises(ValueError):
            ServerSettings(extra_routes=(wrong,))
    two = {name: OpenAISettings(base_url="http://x/v1") for name in "ab"}  # type: ignore[arg-type]
    given = Settings(server=ServerSettings(extra_routes=ROUTES), backends=two)
    with pytest.raises(ConfigurationError, match="extra_routes"):
        create_app(Runtime(given), given)
    own = Settings(server=ServerSettings(extra_routes=("/health",)), backends={"a": two["a"]})
    with pytest.raises(ConfigurationError, match="/health"):
        create_app(Runtime(own), own)
