"""The gateway in front of a vLLM server: labels go along, answers come back as they are, counters are shown."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import ModelSettings, Settings

ANSWER = b'{"choices": [{"message": {"content": "hi"}, "token_ids": null}], "prompt_token_ids": null, "usage": null}'
HEADERS = {"x-agentspec-session": "s1", "x-agentspec-step": "pl%C3%A4n", "content-type": "application/json"}
XARGS = {"agentspec_session": "s1", "agentspec_step": "pl\u00e4n"}
METRICS = b"""\
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 3.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0
"""


def serve(owner: str = "vllm") -> Any:
    """A script for an upstream that answers as vLLM does."""

    def script(request: Any) -> None:
        models = json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode()
        request.answer({"/v1/models": models, "/metrics": METRICS}.get(request.target, ANSWER))

    return script


def tokenizing(tokens: bytes | None) -> Any:
    """A script for vLLM with a tokenizer that knows one text, or without one."""
    plain = serve()

    def script(request: Any) -> None:
        if request.target != "/tokenize":
            return plain(request)
        if tokens is None:
            return request.answer(b"{}", status=404)
        assert json.loads(request.body) == {"model": "m", "prompt": "def f(): pass", "add_special_tokens": False}
        request.answer(b'{"count": 2, "tokens": ' + tokens + b"}")

    return script


def in_front_of(url: str, **settings: Any) -> tuple[dict[str, Any], Settings]:
    up = OpenAISettings(base_url=url, **settings)  # type: ignore[arg-type]
    return {}, Settings(backends={"up": up}, models={"m": ModelSettings(backend="up")})


def post(running: Any, content: bytes, path: str = "/v1/chat/completions") -> httpx.Response:
    return httpx.post(f"{running.url}{path}", content=content, headers=HEADERS, timeout=60)


def sent(server: Any) -> list[bytes]:
    return [request.body for request in server.requests if request.method == "POST"]


@pytest.mark.parametrize(
    "given", [b' {"model":"m", "messages":[],"temperature":1.10}', b'{"model":"m","vllm_xargs" : null , "top_p":1e40}']
)
def test_labels_are_added_and_nothing_else_changes(gateway: Any, upstream: Any, given: bytes) -> None:
    server = upstream(serve())
    answer = post(gateway(*in_front_of(server.url)), given)
    [body] = sent(server)
    assert json.loads(body) == {**json.loads(given), "vllm_xargs": XARGS, "session_id": "s1"}
    assert answer.content == ANSWER


def test_the_clients_own_arguments_stay(gateway: Any, upstream: Any) -> None:
    server = upstream(serve())
    post(gateway(*in_front_of(server.url)), b'{"model":"m","vllm_xargs":{"k":[1,"a"],"agentspec_step":"theirs"}}')
    assert json.loads(sent(server)[0])["vllm_xargs"] == {"k": [1, "a"], **XARGS}


@pytest.mark.parametrize(("owner", "path"), [("somebody", "/v1/chat/completions"), ("vllm", "/v1/embeddings")])
def test_the_same_bytes_for_everybody_else(gateway: Any, upstream: Any, owner: str, path: str) -> None:
    server = upstream(serve(owner))
    body = b' { "model":"m", "vllm_xargs":{"k":1.0} }'
    post(gateway(*in_front_of(server.url)), body, path)
    assert sent(server) == [body]


def test_arguments_that_are_wrong_are_left_for_the_server_to_refuse(gateway: Any, upstream: Any) -> None:
    server = upstream(serve())
    body = b'{"model":"m","vllm_xargs":"x"}'
    post(gateway(*in_front_of(server.url)), body)
    assert list(map(json.loads, sent(server))) == [{"session_id": "s1", **json.loads(body)}]


def test_the_counters_of_the_upstream_stand_beside_the_gateways_own(gateway: Any, upstream: Any) -> None:
    server = upstream(serve())
    running = gateway(*in_front_of(server.url))
    text = httpx.get(f"{running.url}/metrics").text
    assert 'agentspec_upstream_drafts_total{backend="up"} 3.0' in text
    assert 'agentspec_upstream_draft_tokens_total{backend="up"} 12.0' in text
    assert 'agentspec_upstream_accepted_tokens_total{backend="up"} 9.0' in text
    server.close()
    text = httpx.get(f"{running.url}/metrics").text
    assert "agentspec_upstream_drafts_total{" not in text and "agentspec_build_info{" in text


def test_a_sole_upstream_without_names_is_asked_too(gateway: Any, upstream: Any) -> None:
    up = OpenAISettings(base_url=upstream(serve()).url)
    running = gateway({}, Settings(backends={"up": up}))
    assert 'agentspec_upstream_drafts_total{backend="up"} 3.0' in httpx.get(f"{running.url}/metrics").text


def test_other_upstreams_are_not_asked_for_metrics(gateway: Any, upstream: Any) -> None:
    server = upstream(serve("somebody"))
    running = gateway(*in_front_of(server.url))
    assert "agentspec_upstream_drafts_total{" not in httpx.get(f"{running.url}/metrics").text
    assert [request.target for request in server.requests] == ["/v1/models"]


def test_an_upstream_that_is_silent_holds_up_a_scrape_for_seconds_and_nothing_else(
    gateway: Any, upstream: Any, until: Any
) -> None:
    server = upstream(lambda request: request.client_left(8))
    running = gateway(*in_front_of(server.url))
    with httpx.stream("GET", f"{running.url}/health") as health:
        assert health.status_code == 200
    answer = httpx.get(f"{running.url}/metrics", timeout=60)
    assert answer.status_code == 200 and "agentspec_upstream_drafts_total{" not in answer.text


PREDICTED = b'{"model":"m", "messages":[], "prediction": {"type": "content", "content": "def f(): pass"}}'


@pytest.mark.parametrize("tokens", [b"[5, 6]", b"[]", b'["a"]', b"7", None])
def test_a_prediction_is_handed_to_the_drafter_as_token_ids(gateway: Any, upstream: Any, tokens: bytes | None) -> None:
    server = upstream(tokenizing(tokens))
    answer = post(gateway(*in_front_of(server.url)), PREDICTED)
    body = json.loads(sent(server)[-1])
    predicted = {"agentspec_prediction": [5, 6]} if tokens == b"[5, 6]" else {}
    assert body == {**json.loads(PREDICTED), "vllm_xargs": {**XARGS, **predicted}, "session_id": "s1"}
    assert answer.content == ANSWER


def test_no_tokens_are_asked_for_without_a_prediction_or_a_vllm(gateway: Any, upstream: Any) -> None:
    other, vllm = upstream(serve("openai")), upstream(tokenizing(b"[5]"))
    post(gateway(*in_front_of(other.url)), PREDICTED)
    assert sent(other) == [PREDICTED]
    post(gateway(*in_front_of(vllm.url)), b'{"model":"m", "messages":[], "prediction": {"type": "other"}}')
    assert not [request for request in vllm.requests if request.target == "/tokenize"]
