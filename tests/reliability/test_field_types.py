"""C1's part about types: every field that any route knows, with values of every wrong type, on every route."""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

import agentspec.protocol
import agentspec.proxy
from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import Settings
from agentspec.settings.models import ModelSettings
from agentspec.testing import FakeBackend
from tests.proxy.encoder import ConstantEncoder

pytestmark = pytest.mark.reliability
Json = Any
SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 3},
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/messages": {"messages": SAID, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"input": "x"},
}
VALUES: list[Json] = [
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
            for path, base in BODIES.items():
                model = "e" if local and path.endswith("embeddings") else "m"
                for name, value in ((name, value) for name in names for value in VALUES if chosen.random() < share):
                    body = json.dumps({"model": model, **base, name: value})
                    response = client.post(f"{server.url}{path}", content=body)
                    statuses.add(response.status_code)
                    assert response.status_code < 500, (path, local, name, value, response.text)
                    assert response.status_code < 400 or response.json()["error"]["message"], (path, name, value)
    assert {200, 400} <= statuses
