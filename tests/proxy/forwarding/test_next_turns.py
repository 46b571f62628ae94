"""vLLM and SGLang read a client's next turn while its tools run: if the operator wants it, never beyond the share."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest

from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import OpenAISettings
from agentspec.protocol.responses import Accumulator
from agentspec.proxy.admission.auth import Caller
from agentspec.proxy.forwarding import next_turns
from agentspec.proxy.forwarding.next_turns import FollowedAnswer, UpstreamChat, UpstreamTurns
from agentspec.settings.api_keys import ApiKey
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings
from agentspec.types import Delta, Labels

WAIT = 30.0
CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Rome"}'}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Rome?"}]
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "sunny"}


class Engine:
    """A server that answers every chat with a call, except those for one token, and says what it was sent."""

    def __init__(self, upstream: Any, owner: str = "vllm", waiting: int = 0, status: int = 200) -> None:
        self.owner, self.waiting, self.status = owner, waiting, status
        self.hold = threading.Event()
        self.hold.set()
        self.server = upstream(self._answer)

    @property
    def chats(self) -> list[dict[str, Any]]:
        return [request.json for request in self.server.requests if request.target == "/v1/chat/completions"]

    @property
    def prefills(self) -> list[dict[str, Any]]:
        return [chat for chat in self.chats if chat.get("max_tokens") == 1]

    def _answer(self, request: Any) -> None:
        if request.method == "GET":
            pages = {
                "/v1/models": json.dumps({"data": [{"id": "m", "owned_by": self.owner}]}),
                "/metrics": f"vllm:num_requests_running 1\nvllm:num_requests_waiting {self.waiting}\n",
            }
            return request.answer(pages.get(request.target, "{}").encode())
        if request.json.get("max_tokens") == 1:
            self.hold.wait(WAIT)
            return request.answer(b'{"choices": []}', status=self.status)
        if not request.json.get("stream"):
            message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
            return request.answer(
                json.dumps({"choices": [{"message": message, "finish_reason": "tool_calls"}]}).encode()
            )
        request.head()
        for delta in ({"tool_calls": [{"index": 0, **CALL}]}, {}):
            choice = {"index": 0, "delta": delta, "finish_reason": None if delta else "tool_calls"}
            request.send(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        request.send(b"data: [DONE]\n\n")


def settings(url: str, share: float | None, tenants: tuple[str, ...] = ()) -> Settings:
    up = OpenAISettings(base_url=url, prefill_next_turn=share)  # type: ignore[arg-type]
    keys = tuple(ApiKey(tenant=name, key_env=f"KEY_{name}") for name in tenants)
    models = {"m": ModelSettings(backend="up")}
    return Settings(server=ServerSettings(api_keys=keys), backends={"up": up}, models=models)


def ask(running: Any, messages: Any = MESSAGES, headers: Any = None, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": messages, "tools": TOOLS, "temperature": 0, **fields}
    return httpx.post(f"{running.url}/v1/chat/completions", json=body, headers=headers or {}, timeout=60)


def count(running: Any, outcome: str) -> float:
    return float(running.metric("agentspec_upstream_prefills_total", backend="up", outcome=outcome))


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_history_answer_and_frame_are_read_while_the_tool_runs(gateway: Any, upstream: Any, stream: bool) -> None:
    engine = Engine(upstream)
    running = gateway({}, settings(engine.server.url, 1.0))
    ask(running, stream=stream, headers={"x-agentspec-session": "s", "x-agentspec-step": "look"})
    wait_for(lambda: engine.prefills)
    (sent,) = engine.prefills
    real = engine.chats[0]
    assert sent["messages"][:2] == MESSAGES and sent["tools"] == TOOLS and not sent.get("stream")
    assert sent["messages"][2]["tool_calls"][0]["function"] == CALL["function"]
    assert sent["messages"][3] == {**RESULT, "content": ""}
    assert sent["vllm_xargs"] == real["vllm_xargs"] and sent.get("cache_salt") == real.get("cache_salt")
    wait_for(lambda: count(running, "launched") == 1)
    ask(running, [*MESSAGES, *sent["messages"][2:3], RESULT])
    assert count(running, "used") + count(running, "cancelled") == 1
    assert running.metric("agentspec_requests_total", route="/v1/chat/completions", model="m", outcome="ok") == 2


def test_a_tenants_prefill_carries_its_salt(gateway: Any, upstream: Any) -> None:
    engine = Engine(upstream)
    keys = {"KEY_one": "k" * 32, "KEY_two": "j" * 32}
    with pytest.MonkeyPatch.context() as patch:
        for name, key in keys.items():
            patch.setenv(name, key)
        running = gateway({}, settings(engine.server.url, 1.0, ("one", "two")))
        ask(running, headers={"authorization": f"Bearer {keys['KEY_one']}"})
        wait_for(lambda: engine.prefills)
    assert engine.prefills[0]["cache_salt"] == engine.chats[0]["cache_salt"]
    sent = [request for request in engine.server.requests if request.target == "/v1/chat/completions"]
    assert not any(b"k" * 32 in value.encode() for request in sent for value in request.headers.values())


@pytest.mark.parametrize(
    ("share", "options", "headers"),
    [
        (None, {}, {}),
        (1.0, {"owner": "openai"}, {}),
        (1.0, {"waiting": 3}, {}),
        (0.5, {}, {}),
        (1.0, {}, {"x-agentspec-prefill": "off"}),
        (1.0, {}, {"x-agentspec-store": "off"}),
    ],
    ids=["unset", "hosted", "busy", "share", "header", "store"],
)
def test_it_is_not_read(gateway: Any, upstream: Any, share: float | None, options: Any, headers: Any) -> None:
    engine = Engine(upstream, **options)
    running = gateway({}, settings(engine.server.url, share))
    ask(running, headers=headers)
    if engine.waiting:
        wait_for(lambda: any(request.target == "/metrics" for request in engine.server.requests))
    time.sleep(0.05)
    ask(running, [*MESSAGES, {"role": "user", "content": "?"}], headers=headers, tools=None, n=2)
    assert engine.prefills == []


def test_no_more_than_the_share_of_the_calls_is_read(gateway: Any, upstream: Any) -> None:
    engine = Engine(upstream)
    running = gateway({}, settings(engine.server.url, 0.25))
    for number in range(12):
        ask(running)
        wait_for(lambda number=number: len(engine.prefills) == (number + 1) // 4)


def test_the_next_turn_cancels_what_is_still_read_for_it(gateway: Any, upstream: Any) -> None:
    engine = Engine(upstream)
    engine.hold.clear()
    running = gateway({}, settings(engine.server.url, 1.0))
    ask(running)
    wait_for(lambda: engine.prefills)
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    ask(running, [*MESSAGES, message, RESULT], headers={"x-agentspec-prefill": "off"})
    wait_for(lambda: count(running, "cancelled") == 1)
    engine.hold.set()


def test_a_server_that_refuses_is_left_alone_for_a_while(gateway: Any, upstream: Any) -> None:
    engine = Engine(upstream, status=400)
    running = gateway({}, settings(engine.server.url, 1.0))
    ask(running)
    wait_for(lambda: count(running, "failed") == 1)
    assert ask(running).status_code == 200
    assert len(engine.prefills) == 1


def test_one_that_takes_too_long_has_failed_and_was_not_cancelled(
    gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_turns, "SECONDS", 0.5)
    engine = Engine(upstream)
    engine.hold.clear()
    running = gateway({}, settings(engine.server.url, 1.0))
    ask(running)
    wait_for(lambda: count(running, "failed") == 1)
    assert count(running, "cancelled") == 0
    engine.hold.set()


def test_a_call_of_another_tenant_with_the_same_id_ends_nothing(
    gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(upstream)
    engine.hold.clear()
    keys = {name: name[0] * 32 for name in ("one", "two")}
    for name, key in keys.items():
        monkeypatch.setenv(f"KEY_{name}", key)
    running = gateway({}, settings(engine.server.url, 1.0, tuple(keys)))
    one, two = ({"authorization": f"Bearer {key}", "x-agentspec-prefill": "off"} for key in keys.values())
    ask(running, headers={"authorization": one["authorization"]})
    wait_for(lambda: engine.prefills)
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert ask(running, [*MESSAGES, message, RESULT], headers=two).status_code == 200
    assert count(running, "cancelled") == 0
    assert ask(running, [*MESSAGES, message, RESULT], headers=one).status_code == 200
    wait_for(lambda: count(running, "cancelled") == 1)
    engine.hold.set()


@pytest.mark.anyio
async def test_what_is_cancelled_before_it_began_leaves_room_for_the_next() -> None:
    backend = OpenAIBackend(OpenAISettings(base_url="http://127.0.0.1:9/v1"))  # type: ignore[arg-type]
    chat = UpstreamChat("up", backend, "m", Caller("a", Labels(), speculation=True, store=True), {}, MESSAGES, {})
    turns, answer = UpstreamTurns(_credit={"up": 2.0}), Accumulator()
    answer.add(Delta(extra={"tool_calls": [CALL]}))
    turns.ended(chat, answer)
    turns._came("a", [RESULT])
    await asyncio.sleep(0)
    turns.ended(chat, answer)
    assert len(turns._tasks) == 1
    await turns.aclose()
    assert not turns._tasks
    await backend.aclose()


@pytest.mark.anyio
async def test_a_long_answer_is_not_kept_to_be_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Accumulator] = []
    monkeypatch.setattr(UpstreamTurns, "ended", lambda turns, chat, answer: told.append(answer))
    monkeypatch.setattr(next_turns, "MOST_BYTES", 1000)
    backend = OpenAIBackend(OpenAISettings(base_url="http://up.test"))  # type: ignore[arg-type]
    chat = UpstreamChat("up", backend, "m", Caller("a", Labels(), speculation=True, store=True), {}, MESSAGES, {})
    for pieces, known in ((3, 1), (9, 1)):
        followed = FollowedAnswer(UpstreamTurns(), chat, None)
        for _ in range(pieces):
            await followed.edits({"choices": [{"delta": {"content": "x" * 200}}]}, whole=False)
        await followed.edits({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}, whole=False)
        assert len(told) == known
    assert "".join(told[0].choices[0].text) == "x" * 600


def test_an_answer_that_nobody_can_follow_is_passed_on(gateway: Any, upstream: Any) -> None:
    def answer(request: Any) -> None:
        if request.method == "GET":
            request.answer(b"{}")
            return
        request.head()
        for choice in (
            {"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "call-1", "function": "look"}]}},
            {"index": 0, "delta": {}, "finish_reason": "tool_calls"},
        ):
            request.send(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        request.send(b"data: [DONE]\n\n")

    texts = [ask(gateway({}, settings(upstream(answer).url, share)), stream=True).text for share in (None, 1.0)]
    assert texts[0] == texts[1] and '"look"' in texts[0] and texts[0].endswith("data: [DONE]\n\n")
