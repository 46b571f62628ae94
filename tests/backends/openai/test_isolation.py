"""Several tenants of one upstream: each has a salt of its own there, or nothing is sent."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import pytest

from agentspec.backends.base import CHAT, COMPLETIONS, EMBEDDINGS, SharesCaches
from agentspec.backends.http import httpx
from agentspec.backends.openai import OpenAIBackend, server_kind
from agentspec.backends.openai.isolation import TenantIsolation
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError, InvalidRequestError, UpstreamIsolationError
from agentspec.types import GenerateRequest, Labels

pytestmark = pytest.mark.anyio
SECRET = b"s" * 32
SEVERAL = TenantIsolation(SECRET, required=True)
ONE = TenantIsolation(SECRET, required=False)
LABELS = Labels(session="s1", workflow="review", step="plan")


class Server:
    """Lists a model of `owner`, and keeps the bodies that it is sent."""

    def __init__(self, owner: str, key: str | None = None) -> None:
        self.owner, self.key, self.down = owner, key, False
        self.bodies: list[Any] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("refused")
        if request.url.path == "/metrics":
            return answer(f"python_info 1.0\n{self.owner}:num_requests_running 0\n")
        if self.key and request.headers.get("authorization") != self.key:
            return answer("{}", 401)
        if request.url.path == "/v1/models":
            return answer(json.dumps({"data": [{"id": "m", "owned_by": self.owner}]}))
        self.bodies.append(json.loads(request.content))
        whole = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "data": [{"embedding": [1]}]}
        return answer(json.dumps(whole))


def answer(content: str, status: int = 200) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.Response(status, headers=headers, stream=httpx.ByteStream(content.encode()))


def backend(server: Server, isolation: TenantIsolation | None = SEVERAL, **settings: Any) -> OpenAIBackend:
    chosen = OpenAISettings(base_url="http://up.test/v1", model="m", **settings)  # type: ignore[arg-type]
    made = OpenAIBackend(chosen, name="up", transport=httpx.MockTransport(server))
    if isolation is not None:
        made.isolate(isolation)
    return made


async def fields(upstream: OpenAIBackend, tenant: str = "a", path: str = CHAT, **given: Any) -> dict[str, Any]:
    return await upstream.body_fields(path, tenant, Labels(), given)


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS])
async def test_each_tenant_has_a_salt_of_its_own(owner: str, path: str) -> None:
    upstream = backend(Server(owner))
    assert isinstance(upstream, SharesCaches)
    await upstream.check_isolation()
    one, again, other = [(await fields(upstream, tenant, path))["cache_salt"] for tenant in ("a", "a", "b")]
    assert one == again != other and len(one) == 64 and set(one) <= set("0123456789abcdef")
    assert one == SEVERAL.salt("a", *([None] if owner == "vllm" else [None, None]))
    assert TenantIsolation(b"t" * 32, required=True).salt("a", None) != SEVERAL.salt("a", None)


async def test_a_clients_salt_is_hashed_in_and_never_sent() -> None:
    upstream = backend(Server("vllm"))
    found = [(await fields(upstream, tenant, cache_salt=salt))["cache_salt"] for tenant in "ab" for salt in ("x", "y")]
    plain = (await fields(upstream))["cache_salt"]
    assert len({*found, plain}) == 5 and all(len(salt) == 64 for salt in found)
    assert (await fields(upstream, cache_salt=None))["cache_salt"] == plain
    for wrong in (5, [], {}, "", ["a"], True):
        with pytest.raises(InvalidRequestError) as caught:
            await fields(upstream, cache_salt=wrong)
        assert caught.value.param == "cache_salt"


async def test_sglangs_second_salt_becomes_part_of_the_first() -> None:
    upstream = backend(Server("sglang"))
    salts = set()
    for given in ({}, {"extra_key": "x"}, {"cache_salt": "x"}, {"cache_salt": "x", "extra_key": "x"}):
        sent = await fields(upstream, **given)
        assert sent.keys() == {"cache_salt", "extra_key"} & {"cache_salt", *given} and sent.get("extra_key") is None
        salts.add(sent["cache_salt"])
    assert len(salts) == 4


def test_parts_of_a_salt_cannot_be_moved_into_each_other() -> None:
    parts = [("ab",), ("a", "b"), ("a", "b", None), ("a", None, "b"), ('a", "b',)]
    assert len({SEVERAL.salt(*each) for each in parts}) == len(parts)


async def test_one_tenant_needs_no_salt_and_may_choose_one() -> None:
    for upstream in (backend(Server("vllm"), ONE), backend(Server("vllm"), shared_upstream=True)):
        await upstream.check_isolation()
        assert await fields(upstream) == {} == await fields(upstream, cache_salt="Mine-1.0=")
        assert (await upstream.body_fields(CHAT, "a", LABELS, {}))["vllm_xargs"]["agentspec_session"] == "s1"
        for harmful in ("a/b", "../x", "a@b", "a\0b", "x" * 200, "\u00e9"):
            assert len((await fields(upstream, cache_salt=harmful))["cache_salt"]) == 64
    assert await fields(backend(Server("somebody"), ONE), cache_salt="a/b") == {}
    assert await fields(backend(Server("vllm"), None), cache_salt="a/b") == {}


@pytest.mark.parametrize("settings", [{}, {"server_kind": "other"}])
async def test_an_upstream_that_takes_no_salt_is_refused(settings: dict[str, Any]) -> None:
    server = Server("somebody")
    upstream = backend(server, **settings)
    with pytest.raises(ConfigurationError, match=r"'up' is neither vLLM nor SGLang.*shared_upstream"):
        await upstream.check_isolation()
    with pytest.raises(UpstreamIsolationError, match="'up'"):
        await fields(upstream)
    assert await fields(backend(server, shared_upstream=True, **settings)) == {}


async def test_an_upstream_that_does_not_answer_gets_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, now = Server("vllm"), [1000.0]
    monkeypatch.setattr(server_kind.time, "monotonic", lambda: now[0])
    server.down = True
    upstream = backend(server)
    await upstream.check_isolation()
    assert "'up' does not answer" in caplog.text
    for call in (fields(upstream), upstream.embed(["x"], "m", "a"), collect(upstream)):
        with pytest.raises(UpstreamIsolationError):
            await call
    server.down = False
    now[0] += server_kind.RETRY_SECONDS + 1
    assert "cache_salt" in await fields(upstream)
    server.down, now[0] = True, now[0] + server_kind.FRESH_SECONDS + 1
    assert "cache_salt" in await fields(upstream)
    server.down, server.owner, now[0] = False, "somebody", now[0] + server_kind.RETRY_SECONDS + 1
    with pytest.raises(UpstreamIsolationError):
        await fields(upstream)


async def collect(upstream: OpenAIBackend, **request: Any) -> None:
    async with aclosing(upstream.generate(GenerateRequest(model="m", text="x", **request))) as deltas:
        async for _ in deltas:
            pass


async def test_what_the_gateway_asks_itself_is_salted_too() -> None:
    server = Server("vllm")
    upstream = backend(server)
    await collect(upstream, tenant="a", labels=LABELS)
    await collect(upstream, tenant="b", extra={"cache_salt": "x"})
    await upstream.embed(["x"], "m", "a")
    salts = [body["cache_salt"] for body in server.bodies]
    assert salts == [SEVERAL.salt("a", None), SEVERAL.salt("b", "x"), SEVERAL.salt("a", None)]
    assert len(server.bodies[0]["vllm_xargs"]["agentspec_session"]) == 64
