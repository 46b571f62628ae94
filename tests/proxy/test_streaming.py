"""An answer that the gateway keeps as it comes, to send or store it whole, counts in the memory for answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.proxy.body import budget as budget_module
from agentspec.proxy.body.budget import BodyBudget
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings

MEMORY = 1 << 20
ASKED = {"model": "m", "input": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}


@pytest.mark.anyio
async def test_what_is_kept_is_counted_as_it_grows_and_given_back() -> None:
    budget = BodyBudget(MEMORY, shared=False)
    with budget.account("t") as account:
        for pieces in range(1, 400):
            await account.grow(1000)
            assert pieces * 1000 <= 65536 + budget.held <= pieces * 1000 + 2 * 65536
        assert budget.held > 300_000
    assert budget.held == 0


@pytest.mark.anyio
async def test_what_came_whole_is_counted_once() -> None:
    budget = BodyBudget(MEMORY, shared=False)
    with budget.account("t") as account:
        await account.wait_for(400_000)  # for the body in which it came
        held = budget.held
        await account.grow(400_000)
        assert budget.held == held > 300_000


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_translated_answer_stays_within_the_memory(
    path: str, streamed: bool, gateway: Any, upstream: Any, until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "ANSWER_SECONDS", 0.01)
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
        until(lambda: running.app.limiter.running == 0)
        assert running.app.budget.held == 0
    small, large = answers
    assert small.status_code == 200 and small.text.count("x") >= 200_000 and "max_body_memory" not in small.text
    kept = not streamed or path.endswith("responses")  # a stream of messages is passed on as it comes
    assert large.status_code == (200 if streamed else 503) and ("max_body_memory" in large.text) == kept
