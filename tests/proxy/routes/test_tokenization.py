from __future__ import annotations

from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.settings.load import ModelSettings, Settings


@pytest.fixture(scope="module")
def url(tiny_model: Any, shared_gateway: Any) -> str:
    from agentspec.backends.torch import TorchBackend

    backend = TorchBackend.load(TorchSettings(model=str(tiny_model), max_active=1))
    return str(shared_gateway({"m": backend}).url)


def post(url: str, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": "m", **fields}, timeout=300)


def test_a_prompt_and_back(url: str) -> None:
    answer = post(url, "/tokenize", prompt="añb").json()
    assert answer["count"] == len(answer["tokens"]) == 4 and answer["max_model_len"] == 2048
    assert post(url, "/detokenize", tokens=answer["tokens"]).json() == {"prompt": "añb"}
    assert post(url, "/tokenize", prompt="a", return_token_strs=True).json()["error"]["param"] == "return_token_strs"


def test_a_chat_has_the_tokens_that_its_answer_reports(url: str) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    counted = post(url, "/tokenize", **chat).json()["count"]
    assert post(url, "/v1/chat/completions", max_tokens=1, **chat).json()["usage"]["prompt_tokens"] == counted
    assert post(url, "/v1/messages/count_tokens", **chat).json() == {"input_tokens": counted}
    chat["messages"].append({"role": "assistant", "content": "The answer is"})  # the beginning of the answer
    counted = post(url, "/v1/messages/count_tokens", **chat).json()["input_tokens"]
    assert post(url, "/v1/messages", max_tokens=1, **chat).json()["usage"]["input_tokens"] == counted


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "odd": 1}, "odd"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_what_is_wrong_is_refused(url: str, path: str, fields: dict[str, Any], param: str) -> None:
    refused = post(url, path, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_ids_that_the_model_has_not_end_nothing(url: str) -> None:
    assert post(url, "/detokenize", tokens=[2**31 - 1]).status_code < 500


def test_an_upstreams_tokenizer_is_asked(gateway: Any, upstream: Any) -> None:
    server = upstream(lambda request: request.answer(b'{"tokens":[1],  "count":1}'))
    up = OpenAISettings(base_url=server.url, model="org/big")  # type: ignore[arg-type]
    settings = Settings(backends={"up": up}, models={"m": ModelSettings(backend="up")})
    answer = post(gateway({}, settings).url, "/tokenize", prompt="a")
    assert answer.content == b'{"tokens":[1],  "count":1}'
    [request] = server.requests
    assert request.target == "/tokenize" and request.json == {"model": "org/big", "prompt": "a"}


def test_a_text_that_is_too_long_to_tokenize_costs_no_memory(url: str) -> None:
    """A megabyte is tokenized; what the model could never read is refused by its length."""
    assert post(url, "/tokenize", prompt="x y " * 250_000).json()["count"] == 1_000_000
    long = "x y " * 250_000 + "x"
    for path, fields, param in (
        ("/tokenize", {"prompt": long}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": long}]}, "messages"),
    ):
        refused = post(url, path, **fields)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
