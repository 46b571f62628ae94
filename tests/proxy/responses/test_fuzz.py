"""Bodies that no client sends: each gets an answer or an error that is the client's."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.testing import FakeBackend

BODY: dict[str, Any] = {
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
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "top_logprobs": 2,
    "max_output_tokens": 10,
    "temperature": 0.5,
    "top_p": 0.9,
    "truncation": "disabled",
    "metadata": {"a": "b"},
    "user": "u",
    "previous_response_id": None,
}  # fmt: skip
ODD: list[Any] = [
    None, True, 0, -1, 1.5, 1e300, 2**40, 10**25, "", "x", "\x00", "text", "user", "system", "function", "auto",
    "message", "reasoning", "item_reference", "input_image", [], {}, [[]], [None], {"type": "input_text"},
    {"type": "input_text", "text": 1}, {"type": "function_call", "call_id": "c2", "name": "", "arguments": ""},
    {"type": "function", "name": "look"}, {"type": "web_search"}, {"role": "user"}, {"a": {"b": [1]}}, ["x"] * 70,
    "é\U0001f642", {"type": "json_object"}, {"effort": []}, {"type": "function_call_output", "call_id": "c1"},
    {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": "regex", "definition": "("}},
    {"type": "namespace", "name": "look", "tools": [{"type": "function", "name": "look"}]}, "start: start",
    {"type": "tool_search", "execution": "client"}, {"type": "additional_tools", "role": "developer", "tools": []},
    "tool_search", "server", {"type": "function", "name": "late", "defer_loading": True}, "\ud800",
]  # fmt: skip
JSON = {"content-type": "application/json"}  # with half surrogate pairs, which UTF-8 cannot write
NAMES = [
    *BODY, "namespace", "input", "definition", "syntax",
    "type", "role", "content", "id", "call_id", "output", "arguments", "name", "format", "schema", "background",
    "conversation", "prompt", "stream_options", "seed", "stop", "n", "top_k", "logit_bias", "chat_template_kwargs",
    "prediction", "service_tier", "priority", "context_management", "prompt_cache_options", "max_tool_calls",
    "defer_loading", "execution", "tools",
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in `value`, with one of its keys."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def mutated(rng: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(BODY)
    for name in rng.sample([name for name in body if name != "model"], rng.randrange(6)):
        del body[name]
    for _ in range(rng.randint(0, 4)):
        found = [(holder, key) for holder, key in places(body) if not (holder is body and key == "model")]
        holder, key = rng.choice(found)
        if rng.random() < 0.2 and isinstance(holder, dict):
            holder[rng.choice(NAMES[1:])] = copy.deepcopy(rng.choice(ODD))
        elif rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    if rng.random() < 0.2:
        body["stream"] = True
    return body


@pytest.fixture(scope="module")
def local(shared_gateway: Any) -> Any:
    return shared_gateway({"m": FakeBackend("so be it")})


@pytest.fixture(scope="module")
def translated(shared_gateway: Any, shared_upstream: Any) -> Any:
    answer = {"choices": [{"index": 0, "message": {"content": "so"}, "finish_reason": "stop"}]}

    def script(request: Any) -> None:
        if "chat" in request.target:
            request.answer(json.dumps(answer).encode())
        else:
            request.answer(b"{}", 404)

    up = OpenAISettings(base_url=shared_upstream(script).url)
    return shared_gateway({}, Settings(backends={"up": up}, models={"m": ModelSettings(backend="up")}))


@pytest.fixture(scope="module")
def native(shared_gateway: Any, shared_upstream: Any) -> Any:
    whole = b'{"id": "resp_1", "object": "response", "output": []}'
    event = b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_1"}}\n\n'

    def script(request: Any) -> None:
        if request.method == "GET":
            request.answer(b'{"data": []}')
        elif request.body == b"{}":
            request.answer(b"{}", 400)
        elif request.json.get("stream") is True:
            request.answer(event, content_type="text/event-stream")
        else:
            request.answer(whole)

    up = OpenAISettings(base_url=shared_upstream(script).url)
    return shared_gateway({}, Settings(backends={"up": up}, models={"m": ModelSettings(backend="up")}))


def fuzz(running: Any, seed: int, count: int) -> dict[int, int]:
    """How many answers had which status; each is whole, and each error is OpenAI's."""
    rng = random.Random(seed)
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=running.url, timeout=60) as client:
        for _ in range(count):
            body = mutated(rng)
            answer = client.post("/v1/responses", content=json.dumps(body), headers=JSON)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, (answer.text, json.dumps(body))
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error["message"] and error["type"] == "invalid_request_error", error
            elif answer.headers["content-type"].startswith("text/event-stream"):
                assert "event: response.completed\n" in answer.text, (answer.text[-500:], json.dumps(body))
            else:
                assert answer.json()["object"] == "response"
    return statuses


def test_odd_bodies(local: Any) -> None:
    statuses = fuzz(local, 1, 120)
    assert statuses[200] > 5 and statuses[400] > 40, statuses


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_odd_bodies(local: Any, seed: int) -> None:
    assert fuzz(local, seed, 500)[200]


@pytest.mark.slow
@pytest.mark.parametrize("road", ["translated", "native"])
def test_odd_bodies_for_an_upstream(request: pytest.FixtureRequest, road: str) -> None:
    assert fuzz(request.getfixturevalue(road), 7, 500)[200]
