"""What requests hold of `server.max_body_memory`: their bodies, and answers that are collected."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ApiKey, ServerSettings

MEMORY = 1 << 20
ASKED = {"model": "m", "input": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}


def test_a_tenant_may_hold_half_of_the_memory_and_gives_it_back(
    gateway: Any, upstream: Any, until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun = threading.Event(), threading.Semaphore(0)

    def script(request: Any) -> None:
        begun.release()
        go.wait(60)
        request.answer(b"{}")

    for name in "ab":
        monkeypatch.setenv(f"KEY_{name}", f"key-of-{name}")
    keys = tuple(ApiKey(tenant=name, key_env=f"KEY_{name}") for name in "ab")
    running = gateway({"m": upstream(script).backend(shared_upstream=True)}, api_keys=keys, max_body_memory=MEMORY)

    def post(tenant: str, size: int) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * size}]}
        headers = {"authorization": f"Bearer key-of-{tenant}"}
        return httpx.post(f"{running.url}/v1/chat/completions", json=body, headers=headers, timeout=60)

    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(post, "a", 400_000)]
        assert begun.acquire(timeout=60)
        refused = post("a", 200_000)
        assert refused.status_code == 429 and "server.max_body_memory" in refused.json()["error"]["message"]
        held.append(pool.submit(post, "b", 400_000))
        assert begun.acquire(timeout=60)
        go.set()
        assert [one.result().status_code for one in held] == [200, 200]
    until(lambda: running.app.budget.memory.total == 0)
    assert post("a", 400_000).status_code == 200


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_translated_answer_stays_within_the_memory(
    path: str, streamed: bool, gateway: Any, upstream: Any, until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.proxy.body.budget.ANSWER_SECONDS", 0.01)  # that it waits for others' memory
    lengths = iter((200_000, 700_000))

    def script(request: Any) -> None:
        if not request.target.startswith("/v1/chat/"):
            request.answer(b'{"detail":"Not Found"}', 404)
            return
        length = next(lengths)
        if not request.json.get("stream"):
            message = {"role": "assistant", "content": "x" * length}
            request.answer(json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode())
        else:
            request.head()
            for delta in [{"content": "x" * 1000}] * (length // 1000):
                request.send(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")
            request.send(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n')

    up = OpenAISettings(base_url=upstream(script).url, server_kind="other")  # type: ignore[arg-type]
    models: Any = {"m": ModelSettings(backend="up")}
    running = gateway({}, Settings(server=ServerSettings(max_body_memory=MEMORY), backends={"up": up}, models=models))  # type: ignore[arg-type]
    asked = {**ASKED, "stream": streamed}
    asked.pop("input" if path.endswith("messages") else "messages")
    asked.pop("" if path.endswith("messages") else "max_tokens", None)
    answers = []
    for _ in ("small", "large"):
        answers.append(httpx.post(f"{running.url}{path}", json=asked, timeout=60))
        until(lambda: running.app.slots.running == 0)
        assert running.app.budget.memory.total == 0
    small, large = answers
    assert small.status_code == 200 and small.text.count("x") >= 200_000 and "max_body_memory" not in small.text
    held = not streamed or path.endswith("responses")  # a stream of messages is passed on as it comes
    assert large.status_code == (200 if streamed else 503) and ("max_body_memory" in large.text) == held
