"""Bodies that no client sends, on each route that came with Messages: all get an answer or the client's own error."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.testing import FakeBackend
from tests.proxy.encoder import ConstantEncoder

BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 10,
    "stream": False,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": ["the", 1, None]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "5"}],
                    "is_error": True,
                },
                {"type": "text", "text": "And?"},
            ],
        },
    ],
    "tools": [{"name": "look", "description": "Looks", "input_schema": {"type": "object", "properties": {}}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "stop_sequences": ["END"],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "u"},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
}
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "e", "input": ["a b", "c"], "encoding_format": "base64", "dimensions": 3, "user": "u"},
    "/tokenize": {"model": "m", "messages": BODY["messages"][:1], "tools": [], "add_special_tokens": False},
    "/detokenize": {"model": "m", "tokens": [0, 1, 2]},
    "/v1/completions": {"model": "m", "prompt": ["a", "b"], "n": 2, "max_tokens": 3, "echo": True, "stream": False},
}
ODD: list[Any] = [
    None, True, 0, -1, 1.5, 1e300, 2**40, "", "x", "\x00", "text", "user", "system", "tool_use", "image",
    "disabled", [], {}, [[]], [None], {"type": "text"}, {"type": "text", "text": 1},
    {"type": "image", "source": {"type": "url", "url": "x"}},
    {"type": "tool_use", "id": "", "name": "", "input": {}}, {"a": {"b": [1]}}, ["x"] * 70, "\u00e9\U0001f642",
    {"type": "tool", "name": "look"}, {"type": "web_search_20250305", "name": "web_search"}, {"role": "user"},
]  # fmt: skip
PARTS = sorted({key for key in json.dumps(BODY).replace('"', " ").split() if key.isidentifier()})


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in `value`, with one of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def mutated(rng: random.Random, whole: dict[str, Any] = BODY) -> dict[str, Any]:
    body = copy.deepcopy(whole)
    for name in rng.sample(list(body), rng.randrange(min(4, len(body)))):
        if name != "model":
            del body[name]
    for _ in range(rng.randint(1, 4)):
        free = [(place, key) for place, key in places(body) if place is not body or key != "model"]
        if not free:
            body[rng.choice(PARTS)] = copy.deepcopy(rng.choice(ODD))
            continue
        place, key = rng.choice(free)
        match rng.randrange(5):
            case 0:
                del place[key]
            case 1 if isinstance(place, dict):
                place[rng.choice(PARTS)] = copy.deepcopy(rng.choice(ODD))
            case 2 if isinstance(place, list):
                place.append(copy.deepcopy(rng.choice(ODD)))
            case _:
                place[key] = copy.deepcopy(rng.choice(ODD))
        body["model"] = whole["model"]
    return body


@pytest.fixture(scope="module")
def urls(shared_gateway: Any, shared_upstream: Any) -> dict[str, str]:
    """Gateways in front of a model of this process and of an upstream that answers chats."""

    def script(request: Any) -> None:
        if request.target.startswith("/v1/chat/completions"):
            request.answer(b'{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}')
        elif request.target.startswith("/tokenize"):
            request.answer(b'{"tokens":[1,2,3],"count":3,"max_model_len":100}')
        else:
            request.answer(b"{}", 404)

    up = OpenAISettings(base_url=shared_upstream(script).url)  # type: ignore[arg-type]
    settings = Settings(backends={"up": up}, models={"m": ModelSettings(backend="up")})
    local = FakeBackend(lambda request: "Hi there")
    return {
        "local": shared_gateway({"m": local, "e": ConstantEncoder()}).url,
        "upstream": shared_gateway({}, settings).url,
    }


def check(url: str, seed: int, count: int, whole: dict[str, Any] = BODY) -> None:
    rng, answered = random.Random(seed), 0
    with httpx.Client(timeout=60) as client:
        for number in range(count):
            body = mutated(rng, whole)
            response = client.post(url, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
            assert 200 <= response.status_code < 500, (seed, number, body, response.text)
            if response.status_code >= 400:
                error = response.json()
                assert error["error"]["message"], (seed, number, body)
                assert error.get("type") == ("error" if "/messages" in url else None)
            else:
                answered += 1
                assert body.get("stream") or "error" not in response.json()
    assert answered


@pytest.fixture
def fuzz(urls: dict[str, str]) -> Callable[[str, str, int], None]:
    return lambda kind, path, count: check(f"{urls[kind]}/v1/messages{path}", 7, count)


@pytest.mark.parametrize(
    ("kind", "path"), [("local", ""), ("local", "/count_tokens"), ("upstream", ""), ("upstream", "/count_tokens")]
)
def test_odd_bodies(fuzz: Any, kind: str, path: str) -> None:
    fuzz(kind, path, 60)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "path"), [("local", ""), ("local", "/count_tokens"), ("upstream", ""), ("upstream", "/count_tokens")]
)
def test_many_odd_bodies(urls: dict[str, str], kind: str, path: str) -> None:
    check(f"{urls[kind]}/v1/messages{path}", 11, 2000)


@pytest.mark.parametrize("path", OTHERS)
def test_odd_bodies_of_the_other_routes(urls: dict[str, str], path: str) -> None:
    check(f"{urls['local']}{path}", 7, 40, OTHERS[path])


@pytest.mark.long
@pytest.mark.parametrize("path", OTHERS)
def test_many_odd_bodies_of_the_other_routes(urls: dict[str, str], path: str) -> None:
    check(f"{urls['local']}{path}", 11, 2000, OTHERS[path])
