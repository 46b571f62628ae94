"""C1: bodies with parts of odd types, and fields of wrong types, on each route: an answer or the client's own error."""

from __future__ import annotations

import copy
import importlib
import json
import pkgutil
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

import agentspec.protocol
import agentspec.proxy
from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.testing import FakeBackend
from tests.proxy.encoder import ConstantEncoder

pytestmark = pytest.mark.reliability

MESSAGES: dict[str, Any] = {
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
RESPONSE: dict[str, Any] = {
    "model": "m",
    "stream": False,
    "store": True,
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": "And kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}],
         "content": [{"type": "reasoning_text", "text": "Well."}], "encrypted_content": None},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "5"}]},
        {"type": "custom_tool_call", "call_id": "c3", "name": "edit", "namespace": "disk", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
        {"type": "additional_tools", "role": "developer", "tools": [
            {"type": "namespace", "name": "tape", "description": "Tapes", "tools": [
                {"type": "function", "name": "wind"}]}]},
    ],
    "tools": [{"type": "function", "name": "look", "description": "Looks", "parameters": {"type": "object"},
               "strict": True},
              {"type": "namespace", "name": "disk", "description": "The disk", "tools": [
                  {"type": "custom", "name": "edit", "description": "Edits",
                   "format": {"type": "grammar", "syntax": "lark", "definition": "start: /[a-z]+/"}}]}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    "parallel_tool_calls": False,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 10,
    "temperature": 0.5,
    "top_p": 0.9,
    "truncation": "disabled",
    "metadata": {"a": "b"},
    "user": "u",
    "previous_response_id": None,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSE,
    "/v1/embeddings": {"model": "e", "input": ["a b", "c"], "encoding_format": "base64", "dimensions": 3, "user": "u"},
    "/tokenize": {"model": "m", "messages": MESSAGES["messages"][:1], "tools": [], "add_special_tokens": False},
    "/detokenize": {"model": "m", "tokens": [0, 1, 2]},
    "/v1/completions": {"model": "m", "prompt": ["a", "b"], "n": 2, "max_tokens": 3, "echo": True, "stream": False},
}
ODD: list[Any] = [
    None, True, 0, -1, 1.5, 1e300, 2**40, "", "x", "\x00", "text", "user", "system", "tool_use", "image",
    "disabled", [], {}, [[]], [None], {"type": "text"}, {"type": "text", "text": 1},
    {"type": "image", "source": {"type": "url", "url": "x"}},
    {"type": "tool_use", "id": "", "name": "", "input": {}}, {"a": {"b": [1]}}, ["x"] * 70, "\u00e9\U0001f642",
    2**70, "function", "message", "reasoning", "item_reference", "input_image", {"type": "input_text", "text": 1},
    {"type": "function_call", "call_id": "c2", "name": "", "arguments": ""}, {"type": "json_object"}, {"effort": []},
    {"type": "function_call_output", "call_id": "c1"}, {"type": "tool_search", "execution": "client"}, "start: start",
    {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": "regex", "definition": "("}},
    {"type": "namespace", "name": "look", "tools": [{"type": "function", "name": "look"}]}, "\ud800",
    {"type": "additional_tools", "role": "developer", "tools": []}, {"type": "tool", "name": "look"},
    {"type": "web_search_20250305", "name": "web_search"}, {"role": "user"},
]  # fmt: skip
PARTS = sorted(
    {key for key in json.dumps([MESSAGES, RESPONSE]).replace('"', " ").split() if key.isidentifier()}
    | {
        "background",
        "conversation",
        "prompt",
        "stream_options",
        "seed",
        "stop",
        "n",
        "logit_bias",
        "prediction",
        "priority",
    }
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in `value`, with one of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def mutated(rng: random.Random, whole: dict[str, Any]) -> dict[str, Any]:
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
    """Gateways in front of a model of this process, of an upstream that answers chats, and of one with Responses."""

    def chats(request: Any) -> None:
        if request.target.startswith("/v1/chat/completions"):
            request.answer(b'{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}')
        elif request.target.startswith("/tokenize"):
            request.answer(b'{"tokens":[1,2,3],"count":3,"max_model_len":100}')
        else:
            request.answer(b"{}", 404)

    def native(request: Any) -> None:
        if request.method == "GET":
            request.answer(b'{"data": []}')
        elif request.body == b"{}":
            request.answer(b"{}", 400)
        elif request.json.get("stream") is True:
            ended = b'{"type":"response.completed","response":{"id":"resp_1"}}'
            request.answer(b"event: response.completed\ndata: " + ended + b"\n\n", content_type="text/event-stream")
        else:
            request.answer(b'{"id": "resp_1", "object": "response", "output": []}')

    def gateway(script: Callable[[Any], None]) -> str:
        up = OpenAISettings(base_url=shared_upstream(script).url)  # type: ignore[arg-type]
        settings = Settings(backends={"up": up}, models={"m": ModelSettings(backend="up")})
        return str(shared_gateway({}, settings).url)

    local = {"m": FakeBackend(lambda request: "Hi there"), "e": ConstantEncoder()}
    return {"local": shared_gateway(local).url, "chats": gateway(chats), "native": gateway(native)}


def check(url: str, seed: int, count: int, whole: dict[str, Any]) -> None:
    rng, statuses = random.Random(seed), set[int]()
    with httpx.Client(timeout=60) as client:
        for number in range(count):
            body = mutated(rng, whole)
            response = client.post(url, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
            statuses.add(response.status_code)
            assert 200 <= response.status_code < 500, (seed, number, body, response.text)
            if response.status_code >= 400:
                error = response.json()
                assert error["error"]["message"], (seed, number, body)
                assert error.get("type") == ("error" if "/messages" in url else None)
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert not url.endswith("responses") or "event: response.completed\n" in response.text, body
            else:
                assert "error" not in response.json() or url.endswith("responses")
    assert 200 in statuses


ROADS = [
    *(("local", path) for path in BODIES),
    *(("chats", path) for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses")),
    ("native", "/v1/responses"),
]


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize(("kind", "path"), ROADS)
def test_odd_bodies(urls: dict[str, str], kind: str, path: str, count: int) -> None:
    check(f"{urls[kind]}{path}", 7, count, BODIES[path])


Json = Any
SAID = [{"role": "user", "content": "hi"}]
SMALL: dict[str, Json] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 3},
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/messages": {"messages": SAID, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"input": "x"},
}
WRONG: list[Json] = [
    None, True, 0, -1, 1.5, 10**30, 2**63, "", "x", "\0", "\ud800", "NaN", [], [[]], [None], [["a", "b"]],
    ["a", 1, {}], {}, {"": None}, {"a": {"a": []}}, {"\ud800": 1}, [[[[[[]]]]]], {"type": 5}, {"type": "x"},
    [{"type": "text"}], [{"type": "function", "function": None}], [{"role": None}], [{"role": "tool"}],
]  # fmt: skip


def fields() -> list[str]:
    """The names of all fields of all bodies and their parts, as they are sent."""
    names = set[str]()
    for package in (agentspec.protocol, agentspec.proxy):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            for one in vars(importlib.import_module(found.name)).values():
                if isinstance(one, type) and issubclass(one, BaseModel):
                    names |= {field.alias or name for name, field in one.model_fields.items()}
    return sorted(names - {"model"})


def script(request: Any) -> None:
    """An upstream as vLLM: chats, and the tokenizer's routes; it takes whatever comes."""
    answers = {
        "/v1/chat": b'{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}',
        "/v1/completions": b'{"choices":[{"text":"Hi","finish_reason":"stop"}]}',
        "/v1/embeddings": b'{"data":[{"embedding":[1.0],"index":0}],"usage":{"prompt_tokens":1,"total_tokens":1}}',
        "/tokenize": b'{"tokens":[1,2,3],"count":3,"max_model_len":100}',
        "/detokenize": b'{"prompt":"x"}',
    }
    found = next((body for path, body in answers.items() if request.target.startswith(path)), None)
    request.answer(found or b"{}", 200 if found else 404)


@pytest.mark.parametrize(
    "share", [pytest.param(0.002, id="some"), pytest.param(0.02, id="many", marks=pytest.mark.slow),
              pytest.param(1.0, id="all", marks=pytest.mark.long)],
)  # fmt: skip
def test_c1_no_wrong_type_of_any_field_is_an_error_of_ours(gateway: Any, upstream: Any, share: float) -> None:
    up = OpenAISettings(base_url=upstream(script).url)
    settings = Settings(backends={"up": up}, models={"m": ModelSettings(backend="up")})
    servers = [gateway({"m": FakeBackend(lambda request: "Hi there"), "e": ConstantEncoder()}), gateway({}, settings)]
    chosen, names, statuses = random.Random(5), fields(), set[int]()
    assert {"logit_bias", "chat_template_kwargs", "previous_response_id", "tool_choice", "guided_json"} <= {*names}
    with httpx.Client(timeout=60, headers={"content-type": "application/json"}) as client:
        for local, server in zip((True, False), servers, strict=True):
            for path, base in SMALL.items():
                model = "e" if local and path.endswith("embeddings") else "m"
                for name, value in ((name, value) for name in names for value in WRONG if chosen.random() < share):
                    body = json.dumps({"model": model, **base, name: value})
                    response = client.post(f"{server.url}{path}", content=body)
                    statuses.add(response.status_code)
                    assert response.status_code < 500, (path, local, name, value, response.text)
                    assert response.status_code < 400 or response.json()["error"]["message"], (path, name, value)
    assert {200, 400} <= statuses
