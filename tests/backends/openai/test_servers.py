"""What vLLM, SGLang and other servers are sent besides the request: salts, labels, priorities, goals, switches."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import httpx2 as httpx
import pytest

from agentspec.backends.base import CHAT, COMPLETIONS, EMBEDDINGS, SharesCaches
from agentspec.backends.openai import DrafterInfo, OpenAIBackend, TenantIsolation
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError, InvalidRequestError, UpstreamIsolationError
from agentspec.types import Delta, GenerateRequest, Labels

pytestmark = pytest.mark.anyio
SECRET = b"s" * 32
SEVERAL = TenantIsolation(SECRET, required=True)
ONE = TenantIsolation(SECRET, required=False)
NO_LABELS, LABELS = Labels(), Labels(session="s1", workflow="review", step="plan")
OURS = {"agentspec_session": "s1", "agentspec_workflow": "review", "agentspec_step": "plan"}
COUNTERS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a} b"} 90.0
"""
DRAFTER = 'agentspec_vllm_drafter_info{drafter="agentspec",method="suffix",version="0.1.0"} 1.0\n'


class Server:
    """Lists a model of `owner`, publishes `metrics` without a key as vLLM does, and ignores unknown fields."""

    def __init__(self, owner: str = "vllm", metrics: str | None = None, key: str | None = None) -> None:
        self.owner, self.key, self.down = owner, key, False
        self.metrics = f"{owner}:num_requests_running 0\n{DRAFTER}" if metrics is None else metrics
        self.paths: list[str] = []
        self.bodies: list[Any] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.paths.append(path)
        if self.down:
            raise httpx.ConnectError("refused")
        if path == "/metrics":
            return answer(self.metrics)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return answer("{}", 401)
        if path == "/v1/models":
            return answer(json.dumps({"data": [{"id": "m", "owned_by": self.owner}]}))
        self.bodies.append(json.loads(request.content))
        choice = {"message": {"content": "hi"}, "finish_reason": "stop"}
        choice |= {"token_ids": [5, 6]} if self.bodies[-1].get("return_token_ids") else {}
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return answer(json.dumps({"choices": [choice], "usage": usage}))


def answer(content: str, status: int = 200) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.Response(status, headers=headers, stream=httpx.ByteStream(content.encode()))


def backend(server: Server, isolation: TenantIsolation | None = None, **settings: Any) -> OpenAIBackend:
    chosen = OpenAISettings(base_url="http://up.test/v1", model="m", **settings)  # type: ignore[arg-type]
    made = OpenAIBackend(chosen, name="up", transport=httpx.MockTransport(server))
    if isolation is not None:
        made.isolate(isolation)
    return made


async def fields(
    upstream: OpenAIBackend, tenant: str = "a", path: str = CHAT, labels: Labels = NO_LABELS, **given: Any
) -> dict[str, Any]:
    return await upstream.body_fields(path, tenant, labels, given)


async def collect(upstream: OpenAIBackend, **request: Any) -> list[Delta]:
    async with aclosing(upstream.generate(GenerateRequest(model="m", text="x", **request))) as deltas:
        return [delta async for delta in deltas]


# Tenants.


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, EMBEDDINGS])
async def test_each_tenant_has_a_salt_of_its_own(owner: str, path: str) -> None:
    upstream = backend(Server(owner), SEVERAL)
    assert isinstance(upstream, SharesCaches)
    await upstream.check_isolation()
    one, again, other = [(await fields(upstream, tenant, path))["cache_salt"] for tenant in ("a", "a", "b")]
    assert one == again != other and len(one) == 64 and set(one) <= set("0123456789abcdef")
    stranger = backend(Server(owner), TenantIsolation(b"t" * 32, required=True))
    assert (await fields(stranger, path=path))["cache_salt"] != one


async def test_a_clients_salt_is_hashed_in_and_never_sent() -> None:
    upstream = backend(Server("vllm"), SEVERAL)
    found = [(await fields(upstream, tenant, cache_salt=salt))["cache_salt"] for tenant in "ab" for salt in ("x", "y")]
    plain = (await fields(upstream))["cache_salt"]
    assert len({*found, plain}) == 5 and all(len(salt) == 64 for salt in found)
    assert (await fields(upstream, cache_salt=None))["cache_salt"] == plain
    for wrong in (5, [], {}, "", ["a"], True):
        with pytest.raises(InvalidRequestError) as caught:
            await fields(upstream, cache_salt=wrong)
        assert caught.value.param == "cache_salt"


async def test_sglangs_second_salt_becomes_part_of_the_first() -> None:
    upstream = backend(Server("sglang"), SEVERAL)
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
    for upstream in (backend(Server(), ONE), backend(Server(), SEVERAL, shared_upstream=True)):
        await upstream.check_isolation()
        assert await fields(upstream) == {} == await fields(upstream, cache_salt="Mine-1.0=")
        assert (await fields(upstream, labels=LABELS))["vllm_xargs"]["agentspec_session"] == "s1"
        for harmful in ("a/b", "../x", "a@b", "a\0b", "x" * 200, "\u00e9"):
            assert len((await fields(upstream, cache_salt=harmful))["cache_salt"]) == 64
    assert await fields(backend(Server("somebody"), ONE), cache_salt="a/b") == {}
    assert await fields(backend(Server("vllm")), cache_salt="a/b") == {}


@pytest.mark.parametrize("settings", [{}, {"server_kind": "other"}])
async def test_an_upstream_that_takes_no_salt_is_refused(settings: dict[str, Any]) -> None:
    server = Server("somebody")
    upstream = backend(server, SEVERAL, **settings)
    with pytest.raises(ConfigurationError, match=r"'up' is neither vLLM nor SGLang.*shared_upstream"):
        await upstream.check_isolation()
    with pytest.raises(UpstreamIsolationError, match="'up'"):
        await fields(upstream)
    assert await fields(backend(server, SEVERAL, shared_upstream=True, **settings)) == {}


def test_an_upstream_of_unknown_kind_gets_no_request(in_virtual_time: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Once it was recognised, silence does not make it another server; another answer does."""

    async def work() -> None:
        server = Server()
        server.down = True
        upstream = backend(server, SEVERAL)
        await upstream.check_isolation()
        assert "'up' does not answer" in caplog.text
        for call in (fields(upstream), collect(upstream)):
            with pytest.raises(UpstreamIsolationError):
                await call
        assert server.bodies == []
        server.down = False
        await asyncio.sleep(10)
        assert "cache_salt" in await fields(upstream)
        server.down = True
        await asyncio.sleep(70)
        assert "cache_salt" in await fields(upstream)
        server.down, server.owner = False, "somebody"
        await asyncio.sleep(10)
        with pytest.raises(UpstreamIsolationError):
            await fields(upstream)

    in_virtual_time(work())


async def test_requests_of_the_gateway_itself_are_salted_too() -> None:
    server = Server()
    upstream = backend(server, SEVERAL)
    await collect(upstream, tenant="a", labels=LABELS)
    await collect(upstream, tenant="b", extra={"cache_salt": "x"})
    salts = [body["cache_salt"] for body in server.bodies]
    assert salts == [SEVERAL.salt("a", None), SEVERAL.salt("b", "x")]
    assert len(server.bodies[0]["vllm_xargs"]["agentspec_session"]) == 64


# Kinds of servers.


async def test_a_vllm_server_gets_the_labels_and_returns_token_ids() -> None:
    server = Server()
    [delta] = await collect(backend(server), labels=LABELS)
    assert server.bodies[-1]["vllm_xargs"] == OURS and server.bodies[-1]["return_token_ids"] is True
    assert delta.token_ids == (5, 6)


@pytest.mark.parametrize(
    ("server", "settings", "asked"),
    [
        (Server("somebody"), {}, ["/v1/models", "/v1/completions"]),
        (Server("vllm"), {"server_kind": "other"}, ["/v1/completions"]),
        (Server("router"), {"server_kind": "vllm"}, ["/v1/completions"]),
    ],
)
async def test_the_kind_of_server_is_asked_for_or_configured(
    server: Server, settings: dict[str, Any], asked: list[str]
) -> None:
    await collect(backend(server, **settings), labels=LABELS)
    plain = {"model", "prompt", "stream", "stream_options"}
    ours = {"vllm_xargs", "return_token_ids", "session_id"} if settings.get("server_kind") == "vllm" else set()
    assert server.bodies[-1].keys() == plain | ours and server.paths == asked


async def test_a_server_that_wants_a_key_for_its_models_is_known_by_its_metrics() -> None:
    server = Server(key="secret")
    assert await fields(backend(server), labels=LABELS) == {"vllm_xargs": OURS, "session_id": "s1"}
    assert server.paths == ["/v1/models", "/metrics"]
    other = Server(key="secret", metrics="python_info 1.0\n")
    assert await fields(backend(other), labels=LABELS) == {}


PRIORITIES: list[tuple[str, str, int | None]] = [
    ("vllm", "auto", 3),
    ("sglang", "auto", -3),
    ("sglang", "lowest_first", 3),
    ("somebody", "highest_first", -3),
    ("vllm", "off", None),
]


@pytest.mark.parametrize(("owner", "setting", "sent"), PRIORITIES)
async def test_a_priority_is_sent_on_the_servers_scale(owner: str, setting: str, sent: int | None) -> None:
    upstream = backend(Server(owner), priority=setting)
    assert (await fields(upstream, priority=3)).get("priority") == sent
    assert await fields(upstream) == {}


@pytest.mark.parametrize("value", [-1, 1.5, True, "1", 2**31])
async def test_negative_and_unscaled_priorities_are_refused(value: Any) -> None:
    for owner, given in (("vllm", value), ("somebody", 1)):
        with pytest.raises(InvalidRequestError, match="priority"):
            await fields(backend(Server(owner), priority="auto"), priority=given)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (COUNTERS + DRAFTER, DrafterInfo("agentspec", "suffix", "0.1.0")),
        (COUNTERS, DrafterInfo()),
        ("", DrafterInfo()),
        (DRAFTER.replace("1.0\n", "NaN\n"), DrafterInfo()),
        (f"<html>{DRAFTER}</html>", DrafterInfo()),
    ],
)
async def test_the_probe_finds_the_drafter(metrics: str, expected: DrafterInfo) -> None:
    server = Server(metrics=metrics)
    assert (await backend(server).probe()).drafter == expected
    assert (await backend(Server("somebody")).probe()).drafter is None
    assert (await backend(server, server_kind="other").probe()).drafter is None


async def test_long_labels_in_metrics_are_read_in_linear_time() -> None:
    """By the square of it, the longest metrics that are read would block the gateway for a day."""
    for labels in ("x" * 200_000, 'x="' + "y" * 200_000, 'x="' * 50_000):
        metrics = f"agentspec_vllm_drafter_info{{{labels}}} 3\n"
        assert (await backend(Server(metrics=metrics)).probe()).drafter == DrafterInfo()
