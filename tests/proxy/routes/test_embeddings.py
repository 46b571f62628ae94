"""`/v1/embeddings` of an encoder in this process, by OpenAI's client."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import openai
import pytest

from agentspec.settings.load import Settings, load_settings
from agentspec.testing import FakeBackend
from tests.proxy.encoder import CountingEncoder


@pytest.fixture(scope="module")
def url(shared_gateway: Any) -> str:
    running = shared_gateway({"e": CountingEncoder(), "m": FakeBackend("ok")})
    return f"{running.url}/v1"


def post(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/embeddings", json={"model": "e", "input": "a", **fields}, timeout=60)


def test_openais_client_gets_vectors(url: str, closing: Any) -> None:
    client = closing(openai.OpenAI(base_url=url, api_key="none", max_retries=0))
    answer = client.embeddings.create(model="e", input=["ab", "b b"])
    assert [one.embedding for one in answer.data] == [[0.25, 0.25, 0.5], [0.0, 0.5, 0.75]]
    assert [one.index for one in answer.data] == [0, 1] and answer.usage.prompt_tokens == 3
    plain = client.embeddings.create(model="e", input="ab", encoding_format="float", dimensions=3, user="me")
    assert np.allclose(plain.data[0].embedding, answer.data[0].embedding)


def test_a_text_that_is_too_long_is_cut_only_if_it_may_be(url: str) -> None:
    refused = post(url, input=["a", "a " * 9])
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert "input[1]" in refused.json()["error"]["message"]
    for cut in (-1, 8):
        answer = post(url, input="a " * 9, truncate_prompt_tokens=cut)
        assert answer.json()["usage"] == {"prompt_tokens": 8, "total_tokens": 8}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [1, 2]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 2}, "dimensions"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"task": "x"}, "task"),
        ({"model": "m"}, "model"),
    ],
)
def test_unsupported_embeddings_are_refused(url: str, fields: dict[str, Any], param: str) -> None:
    refused = post(url, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages"])
def test_an_encoder_answers_nothing_else(url: str, path: str) -> None:
    asked = {"model": "e", "max_tokens": 5, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    refused = httpx.post(
        f"{url}/{path}", json={name: asked[name] for name in asked if name != "prompt" or path == "completions"}
    )
    assert refused.status_code == 400


@pytest.mark.model
def test_the_built_in_encoder(gateway: Any, closing: Any) -> None:
    settings = load_settings(overrides={"backends": {"texts": {"kind": "encoder"}}})
    assert isinstance(settings, Settings)
    client = closing(openai.OpenAI(base_url=f"{gateway({}, settings).url}/v1", api_key="none", max_retries=0))
    texts = ["A cat sits on the mat.", "On the rug there is a kitten.", "Interest rates rose again."]
    answer = client.embeddings.create(model="minilm", input=texts)
    cat, kitten, money = (np.asarray(one.embedding) for one in answer.data)
    assert cat.shape == (384,) and np.isclose(cat @ cat, 1, atol=1e-5)
    assert cat @ kitten > cat @ money + 0.2 and answer.usage.prompt_tokens > 15
