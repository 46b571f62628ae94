from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest

from agentspec.backends.base import tokenization_of
from agentspec.backends.openai import OpenAIBackend, ProbeReport
from agentspec.backends.settings import OpenAISettings

pytestmark = pytest.mark.anyio


def answer(body: Any, status: int = 200) -> httpx.Response:
    content = body if isinstance(body, str) else json.dumps(body)
    stream = httpx.ByteStream(content.encode())
    return httpx.Response(status, headers={"content-type": "application/json"}, stream=stream)


class Upstream:
    """An endpoint with the abilities it is given; like many real ones it ignores fields that it does not know."""

    def __init__(self, *abilities: str, models: tuple[str, ...] = ("one", "two"), status: int = 200) -> None:
        self.abilities = abilities
        self.models = models
        self.status = status
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return answer({"data": [{"id": name} for name in self.models]})
        if self.status != 200:
            return answer({"error": {"message": "broken"}}, self.status)
        body = json.loads(request.content)
        if request.url.path in ("/tokenize", "/detokenize"):
            return self.tokenizer(request.url.path, body)
        self.bodies.append(body)
        continued = "continue" in self.abilities and body.get("continue_final_message")
        usage = {"prompt_tokens": 8 if continued else 12, "completion_tokens": 1}
        choice: dict[str, Any] = {"message": {"content": "x"}, "finish_reason": "length"}
        prompt: dict[str, Any] = {}
        if "prompt ids" in self.abilities and body.get("return_token_ids"):
            prompt = {"prompt_token_ids": self.read(body)}
        if "ids" in self.abilities and body.get("return_token_ids"):
            choice["token_ids"] = [1]
        if "logprobs" in self.abilities and body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "x", "logprob": 0.0}]}
        return answer({"choices": [choice], "usage": usage, **prompt})

    def read(self, body: dict[str, Any]) -> list[int]:
        """A message's characters; with the ability to misread, one emoji is another token."""
        text = "".join(f"<{message['role']}>{message['content']}" for message in body["messages"]) + "<assistant>"
        return [*map(ord, text.replace("\U0001f642", "?") if "misread" in self.abilities else text)]

    def tokenizer(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """As vLLM's: a token a character, and a chat template that puts the role before the content."""
        if "tokenizer" not in self.abilities:
            return answer({"error": {"message": "not found"}}, 404)
        if path == "/detokenize":
            return answer({"prompt": "".join(map(chr, body["tokens"]))})
        text = "".join(f"<{message['role']}>{message['content']}" for message in body.get("messages", ()))
        return answer({"tokens": [*map(ord, text + "<assistant>" if text else body["prompt"])]})


def backend(upstream: Any, model: str | None = None) -> OpenAIBackend:
    settings = OpenAISettings(base_url="http://upstream.test/v1", model=model)  # type: ignore[arg-type]
    return OpenAIBackend(settings, transport=httpx.MockTransport(upstream))


@pytest.mark.parametrize(
    ("ability", "field"),
    [
        ("ids", "token_ids"),
        ("continue", "continue_final"),
        ("logprobs", "logprobs"),
        ("tokenizer", "tokenizes"),
    ],
)
async def test_each_ability_is_found_by_itself(ability: str, field: str) -> None:
    report = await backend(Upstream(ability)).probe()
    assert report == ProbeReport(reachable=True, models=("one", "two"), answers=True, **{field: True})


async def test_a_server_with_a_tokenizer_takes_token_ids() -> None:
    probed = backend(Upstream("ids", "tokenizer"))
    assert tokenization_of(probed) is None
    await probed.probe()
    side = tokenization_of(probed)
    assert side is not None and await side.tokenize("ab") == [97, 98] and await side.detokenize([98]) == "b"
    assert await side.render([{"role": "user", "content": "hi"}]) == "<user>hi<assistant>"
    without_ids = backend(Upstream("tokenizer"))
    await without_ids.probe()
    assert tokenization_of(without_ids) is None


@pytest.mark.reliability
async def test_u12_a_tokenizer_that_is_not_the_models_is_found_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    same = backend(Upstream("ids", "tokenizer", "prompt ids"))
    report = await same.probe()
    assert report.tokenizes and not report.other_tokenizer and tokenization_of(same) is not None
    other = backend(Upstream("ids", "tokenizer", "prompt ids", "misread"))
    report = await other.probe()
    assert report.other_tokenizer and not report.tokenizes and report.token_ids
    assert tokenization_of(other) is None and "tokenizer is not that of its model" in caplog.text


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("upstream", "reachable", "said"),
    [
        (Upstream(status=400), True, "broken"),
        (Upstream(models=()), True, "lists no model"),
        (lambda request: answer({}, 401), True, "401"),  # a wrong key
        (refuse, False, "ConnectError"),
        (lambda request: answer("<html>"), False, "not JSON"),
    ],
)
async def test_a_failed_probe_says_why(upstream: Any, reachable: bool, said: str) -> None:
    report = await backend(upstream).probe()
    assert not report.answers and report.reachable == reachable and said in (report.error or "")
