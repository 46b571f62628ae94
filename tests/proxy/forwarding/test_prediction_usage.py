"""What became of a prediction, in the usage of answers from vLLM, which does not tell it itself."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from agentspec.backends.openai.prediction import MAX_TOKENS
from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import ModelSettings, Settings

TEXT = "def f(a): return a + 1"
ANSWER = "def f(a): return a + 2"
USAGE = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9, "completion_tokens_details": None}
COUNTS = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 1}  # of six words


def words(text: str) -> list[int]:
    return [sum(word.encode()) for word in text.split()]


def vllm(answer: bytes, *, stream: bool = False, owner: str = "vllm", tokenizes: int = 9, pieces: int = 1 << 20) -> Any:
    """A script for vLLM with a tokenizer of words, which answers `tokenizes` times."""
    left = [tokenizes]

    def script(request: Any) -> None:
        if request.target == "/v1/models":
            return request.answer(json.dumps({"data": [{"id": "m", "owned_by": owner}]}).encode())
        if request.target == "/tokenize":
            left[0] -= 1
            tokens = json.dumps({"tokens": words(request.json["prompt"])}).encode()
            return request.answer(tokens) if left[0] >= 0 else request.answer(b"{}", status=500)
        if not stream:
            return request.answer(answer)
        request.head(transfer_encoding="chunked")
        for start in range(0, len(answer), pieces):
            request.chunk(answer[start : start + pieces])
        request.chunk(b"")

    return script


def settings(url: str, **backend: Any) -> Settings:
    up = OpenAISettings(base_url=url, **backend)  # type: ignore[arg-type]
    return Settings(backends={"up": up}, models={"m": ModelSettings(backend="up")})


def post(running: Any, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    body = {"model": "m", "prediction": {"type": "content", "content": TEXT}, **fields}
    return httpx.post(f"{running.url}{path}", json=body, timeout=60)


def chat(text: str = ANSWER, index: int = 0) -> dict[str, Any]:
    return {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}


def whole(*choices: dict[str, Any], usage: Any = USAGE) -> bytes:
    # An odd spelling, of which every byte outside the usage must stay.
    return b'{"x" : 1.10, "choices":%s ,"usage" : %s, "y":null }' % (
        json.dumps(choices).encode(),
        json.dumps(usage).encode(),
    )


def chunk(delta: Any = None, usage: Any = None, field: str = "delta", **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, field: delta, **more}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


def streamed(*, usage: Any = USAGE) -> bytes:
    head, tail = ANSWER[:9], ANSWER[9:]
    return b"".join((
        chunk({"role": "assistant", "content": ""}, usage={"completion_tokens": 0}),
        b": odd \xf0\x9f\r\n\r\n",
        chunk({"content": head}, usage={"completion_tokens": 2}),
        chunk({"content": tail}, finish_reason="stop"),
        chunk(usage=usage),
        b"data: [DONE]\n\n",
    ))  # fmt: skip


def read(line: bytes) -> Any:
    """A line of a stream: the JSON of one with data."""
    return json.loads(line[5:]) if line.startswith(b"data:") and b"[DONE]" not in line else line


def counted(body: bytes) -> dict[str, Any]:
    return dict(json.loads(body)["usage"]["completion_tokens_details"])


def test_a_whole_answer_gets_the_counts_and_nothing_else(gateway: Any, upstream: Any) -> None:
    sent = whole(chat())
    running = gateway({}, settings(upstream(vllm(sent)).url))
    answer = post(running, messages=[])
    assert counted(answer.content) == COUNTS
    told = {**json.loads(sent), "usage": {**USAGE, "completion_tokens_details": COUNTS}}
    assert answer.json() == told


def test_each_choice_has_the_whole_prediction(gateway: Any, upstream: Any) -> None:
    running = gateway({}, settings(upstream(vllm(whole(chat(TEXT), chat("other", 1)))).url))
    found = counted(post(running, messages=[], n=2).content)
    assert found == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 6}


def test_completions_too_and_details_of_the_servers_stay(gateway: Any, upstream: Any) -> None:
    usage = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 2}}
    running = gateway({}, settings(upstream(vllm(whole({"text": ANSWER}, usage=usage))).url))
    found = counted(post(running, "/v1/completions", prompt="x").content)
    assert found == {"reasoning_tokens": 2, **COUNTS}


@pytest.mark.parametrize("pieces", [1 << 20, 7])
def test_the_last_chunk_of_a_stream_gets_the_counts(gateway: Any, upstream: Any, pieces: int) -> None:
    running = gateway({}, settings(upstream(vllm(streamed(), stream=True, pieces=pieces)).url))
    answer = post(running, messages=[], stream=True, stream_options={"include_usage": True})
    told = json.dumps({**USAGE, "completion_tokens_details": COUNTS}).encode()
    expected = streamed().replace(json.dumps(USAGE).encode(), told)
    assert list(map(read, answer.content.splitlines())) == list(map(read, expected.splitlines()))


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        ({}, {"prediction": None}),
        ({"owner": "somebody"}, {}),
        ({"tokenizes": 1}, {}),  # the prediction's tokens, and then none of the answer's
        ({"usage": {**USAGE, "completion_tokens_details": {"accepted_prediction_tokens": 0}}}, {}),
        ({"usage": None}, {}),
        ({"usage": [1]}, {}),
    ],
)
@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_bytes_stay_where_there_is_nothing_to_tell(
    gateway: Any, upstream: Any, script: dict[str, Any], fields: dict[str, Any], stream: bool
) -> None:
    usage = script.pop("usage", USAGE) if "usage" in (script := dict(script)) else USAGE
    sent = streamed(usage=usage) if stream else whole(chat(), usage=usage)
    running = gateway({}, settings(upstream(vllm(sent, stream=stream, **script)).url))
    assert post(running, messages=[], stream=stream, **fields).content == sent


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"no JSON", b'{"choices": 7, "usage": {}}', b'{"choices": [7]}'])
def test_odd_answers_pass(gateway: Any, upstream: Any, content: bytes) -> None:
    running = gateway({}, settings(upstream(vllm(content)).url))
    answer = post(running, messages=[])
    assert answer.status_code == 200
    if b"usage" not in content:
        assert answer.content == content


@pytest.mark.parametrize("stream", [False, True])
def test_responses_by_translation_have_them(gateway: Any, upstream: Any, stream: bool) -> None:
    sent = streamed() if stream else whole(chat())
    running = gateway({}, settings(upstream(vllm(sent, stream=stream)).url, responses="off"))
    answer = post(running, "/v1/responses", input="x", stream=stream)
    body = json.loads(answer.content.split(b"data: ")[-1])["response"] if stream else answer.json()
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 0, **COUNTS}


def test_messages_by_translation_have_no_such_field(gateway: Any, upstream: Any) -> None:
    running = gateway({}, settings(upstream(vllm(whole(chat()))).url, messages="off"))
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    answer = post(running, "/v1/messages", **body)
    assert answer.status_code == 200
    usage = answer.json()["usage"]
    assert usage["output_tokens"] == 6 and not [name for name in usage if "prediction" in name]


@pytest.mark.parametrize(
    "tokens",
    [[[1], [2], [3]], ["a"], [1.5], [True], [1] * (MAX_TOKENS + 1)],
    ids=["lists", "text", "floats", "booleans", "many"],
)
def test_tokens_of_a_clients_own_that_no_prediction_has_are_not_followed(
    shared_upstream: Any, shared_gateway: Any, tokens: list[Any]
) -> None:
    server = shared_upstream(vllm(whole(chat())))
    running = shared_gateway({}, settings(server.url))
    answer = post(running, vllm_xargs={"agentspec_prediction": tokens})
    assert answer.status_code == 200 and answer.content == whole(chat())


def test_odd_answers_stay_as_they_are(shared_upstream: Any, shared_gateway: Any) -> None:
    for content in (
        b"\xef\xbb\xbf" + whole(chat()),
        whole(chat()).replace(b"{", b'{"x":' + b"[" * 600 + b"]" * 600 + b",", 1),
    ):
        running = shared_gateway({}, settings(shared_upstream(vllm(content)).url))
        answer = post(running)
        assert answer.status_code == 200
