"""vLLM as an upstream: told from other servers, told the labels, asked for token ids and for its counters."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import pytest

from agentspec.backends.base import CHAT
from agentspec.backends.http import httpx
from agentspec.backends.openai import DrafterInfo, OpenAIBackend, server_kind
from agentspec.backends.openai.metrics import parse_drafter, parse_load
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import InvalidRequestError
from agentspec.types import Delta, GenerateRequest, Labels

pytestmark = pytest.mark.anyio
LABELS = Labels(session="s1", workflow="review", step="plan")
OURS = {"agentspec_session": "s1", "agentspec_workflow": "review", "agentspec_step": "plan"}
COUNTERS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 4.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 1.2e+02
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a} b"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 7.0
"""
DRAFTER = 'agentspec_vllm_drafter_info{drafter="agentspec",method="suffix",version="0.1.0"} 1.0\n'


class VllmServer:
    """Answers as `vllm serve` does: `/metrics` beside `/v1`, unknown fields ignored."""

    def __init__(self, owner: str = "vllm", metrics: str = COUNTERS + DRAFTER, key: str | None = None) -> None:
        self.owner, self.metrics, self.key = owner, metrics, key
        self.requests: list[httpx.Request] = []
        self.down = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.down:
            raise httpx.ConnectError("refused")
        guarded = request.url.path.startswith("/v1")
        if guarded and self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return reply({"error": "Unauthorized"}, 401)
        return {"/metrics": self._metrics, "/v1/models": self._models}.get(request.url.path, self._chat)(request)

    @property
    def paths(self) -> list[str]:
        return [request.url.path for request in self.requests]

    @property
    def body(self) -> Any:
        return json.loads(self.requests[-1].content)

    def _metrics(self, request: httpx.Request) -> httpx.Response:
        return reply(self.metrics)

    def _models(self, request: httpx.Request) -> httpx.Response:
        return reply({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": self.owner}]})

    def _chat(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        ids = [5, 6] if body.get("return_token_ids") else None
        choice = {"index": 0, "message": {"content": "hi"}, "finish_reason": "stop", "token_ids": ids}
        return reply({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


def reply(content: Any, status: int = 200) -> httpx.Response:
    """An answer whose body was not read yet, as one from the network."""
    text = content if isinstance(content, str) else json.dumps(content)
    stream = httpx.ByteStream(text.encode())
    return httpx.Response(status, headers={"content-type": "application/json"}, stream=stream)


def backend(server: VllmServer, **settings: Any) -> OpenAIBackend:
    chosen = OpenAISettings(base_url="http://up.test/v1", model="m", **settings)  # type: ignore[arg-type]
    return OpenAIBackend(chosen, transport=httpx.MockTransport(server))


async def collect(upstream: OpenAIBackend, **fields: Any) -> list[Delta]:
    fields = {"text": "x", "labels": LABELS, **fields}
    async with aclosing(upstream.generate(GenerateRequest(model="m", **fields))) as deltas:
        return [delta async for delta in deltas]


async def test_a_vllm_server_is_told_the_labels_and_asked_for_token_ids() -> None:
    server = VllmServer()
    [delta] = await collect(backend(server))
    assert server.body["vllm_xargs"] == OURS and server.body["return_token_ids"] is True
    assert delta.token_ids == (5, 6)


@pytest.mark.parametrize(
    ("owner", "settings", "asked"),
    [
        ("somebody", {}, ["/v1/models", "/v1/completions"]),
        ("vllm", {"server_kind": "other"}, ["/v1/completions"]),
    ],
)
async def test_others_get_the_body_that_they_always_got(owner: str, settings: dict[str, Any], asked: list[str]) -> None:
    server = VllmServer(owner)
    await collect(backend(server, **settings))
    assert set(server.body) == {"model", "prompt", "stream", "stream_options"}
    assert server.paths == asked


async def test_a_server_behind_a_router_is_named_by_the_settings() -> None:
    server = VllmServer("router")
    await collect(backend(server, server_kind="vllm"))
    assert server.body["vllm_xargs"] == OURS and server.paths == ["/v1/completions"]


async def test_a_server_that_wants_a_key_for_its_models_is_known_by_its_metrics() -> None:
    server = VllmServer(key="secret")
    told = {"vllm_xargs": OURS, "session_id": "s1"}
    assert await backend(server).body_fields(CHAT, "default", LABELS, {}) == told
    assert server.paths == ["/v1/models", "/metrics"]
    other = VllmServer(key="secret", metrics="python_info 1.0\n")
    assert await backend(other).body_fields(CHAT, "default", LABELS, {}) == {}


async def test_what_an_upstream_is_holds_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    server, now = VllmServer(), [1000.0]
    monkeypatch.setattr(server_kind.time, "monotonic", lambda: now[0])
    upstream = backend(server)
    for _ in range(2):
        assert await upstream.body_fields(CHAT, "default", LABELS, {})
    assert server.paths == ["/v1/models"]
    now[0] += server_kind.FRESH_SECONDS + 1
    server.down = True
    assert await upstream.body_fields(CHAT, "default", LABELS, {})  # silence is no other server
    now[0] += server_kind.RETRY_SECONDS + 1
    server.down, server.owner = False, "somebody"
    assert await upstream.body_fields(CHAT, "default", LABELS, {}) == {}


GOAL = {"vllm_xargs": {"agentspec_latency_ms_per_token": 20.0}}


async def goal_told(upstream: OpenAIBackend, **given: Any) -> dict[str, Any]:
    asked = {"latency_target_ms_per_token": 20, **given}
    return await upstream.body_fields(CHAT, "default", Labels(), asked)


@pytest.mark.parametrize(
    ("server", "settings"),
    [
        (VllmServer(metrics=COUNTERS), {}),  # without our plug-in
        (VllmServer(metrics=DRAFTER.replace("suffix", "ngram_gpu")), {}),  # whose drafts have one length
        (VllmServer(metrics=DRAFTER.replace('drafter="agentspec"', 'drafter="arctic"')), {}),
        (VllmServer("somebody"), {}),
        (VllmServer(), {"server_kind": "other"}),
    ],
)
async def test_no_other_server_is_told_a_latency_goal(server: VllmServer, settings: dict[str, Any]) -> None:
    upstream = backend(server, **settings)
    assert not await upstream.keeps_latency(CHAT) and await goal_told(upstream) == {}


@pytest.mark.parametrize("goal", ["20", 0, -1, True, [20], float("inf"), float("nan"), 10**400])
async def test_a_latency_goal_that_is_none_is_refused(goal: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await goal_told(backend(VllmServer()), latency_target_ms_per_token=goal)
    assert caught.value.param == "latency_target_ms_per_token"


async def test_who_drafts_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    server, now = VllmServer(metrics=COUNTERS), [1000.0]
    monkeypatch.setattr(server_kind.time, "monotonic", lambda: now[0])
    upstream = backend(server)
    assert not await upstream.keeps_latency(CHAT)
    server.metrics = COUNTERS + DRAFTER
    assert not await upstream.keeps_latency(CHAT) and server.paths.count("/metrics") == 1
    now[0] += server_kind.FRESH_SECONDS + 1
    assert await upstream.keeps_latency(CHAT)
    now[0] += server_kind.FRESH_SECONDS + 1
    server.down = True
    assert await upstream.keeps_latency(CHAT)  # silence is no other drafter


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (COUNTERS + DRAFTER, DrafterInfo("agentspec", "suffix", "0.1.0")),
        (COUNTERS, DrafterInfo()),
        ("", DrafterInfo()),
        (DRAFTER.replace("1.0\n", "NaN\n"), DrafterInfo()),
        (f"<html>{DRAFTER}</html>", DrafterInfo()),
    ],
)
def test_the_drafter_in_metrics_of_all_sorts(text: str, expected: DrafterInfo) -> None:
    assert parse_drafter(text) == expected


def test_labels_without_end_take_time_by_their_length() -> None:
    """By the square of it the longest answer that is read would hold the gateway up for a day."""
    for labels in ("x" * 200_000, 'x="' + "y" * 200_000, 'x="' * 50_000):
        load = parse_load(f"vllm:num_requests_running{{{labels}}} 3\n")
        assert load is not None and load.running == 3


async def test_the_probe_finds_the_drafter() -> None:
    server = VllmServer()
    report = await backend(server).probe()
    assert report.token_ids and report.drafter == DrafterInfo("agentspec", "suffix", "0.1.0")
    assert (await backend(VllmServer("somebody")).probe()).drafter is None
    assert (await backend(server, server_kind="other").probe()).drafter is None
