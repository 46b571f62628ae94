"""The hot path, through the official OpenAI client and through curl, over a real socket."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import ContextLengthError, EngineError, OverloadedError
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Delta, GenerateRequest, Labels, Speculation

MODEL = "fake"
HELLO: list[Any] = [{"role": "user", "content": "hello there"}]
DONE = Speculation(drafted=6, accepted=4, steps=3, estimated_seconds_saved=0.5)


def script(request: GenerateRequest) -> Any:
    """What the test asks for stands in its last message or prompt."""
    asked = request.text or str((request.messages or [{}])[-1].get("content"))
    if asked == "slow":
        return Answer("one two three four five", latency=0.3)
    if asked == "breaks":
        return Answer("one two three", error=EngineError("the engine broke"), error_after=2)
    if asked == "crashes":
        return Answer("one two three", error=ZeroDivisionError("a secret prompt"), error_after=2)
    errors: dict[str, Exception] = {
        "too long": ContextLengthError("the prompt has 9 tokens, the model takes 4", param="messages"),
        "busy": OverloadedError("the queue is full", retry_after=2.5),
        "bug": ZeroDivisionError("a secret prompt"),
    }
    return errors.get(asked) or Answer("brave new wörld", speculation=DONE)


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend(script)


@pytest.fixture(scope="module")
def running(shared_gateway: Any, backend: FakeBackend) -> Any:
    return shared_gateway({MODEL: backend})


@pytest.fixture(scope="module")
def client(running: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, content: str = "hi", **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], **fields)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "brave new wörld" and answer.choices[0].finish_reason == "stop"
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 3)
    assert answer.model == MODEL and answer.object == "chat.completion"
    assert answer.to_dict()["speculation"] == {
        "drafted": 6,
        "accepted": 4,
        "steps": 3,
        "estimated_seconds_saved": 0.5,
    }


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "brave new wörld"
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) == 5
    assert chunks[-1].usage.completion_tokens == 3 and chunks[-1].choices == []
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a b", logprobs=1)
    assert answer.choices[0].text == "brave new wörld" and answer.choices[0].logprobs
    assert answer.choices[0].logprobs.tokens == ["brave", " new", " wörld"]
    assert answer.choices[0].logprobs.text_offset == [0, 5, 9]
    streamed = list(client.completions.create(model=MODEL, prompt=[1, 2], stream=True, max_tokens=2))
    assert "".join(chunk.choices[0].text for chunk in streamed) == "brave new"
    assert streamed[-1].choices[0].finish_reason == "length"


def test_the_stream_helper_of_the_client(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=1) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "brave new wörld"
    assert final.choices[0].logprobs and final.choices[0].logprobs.content
    assert [entry.token for entry in final.choices[0].logprobs.content] == ["brave", " new", " wörld"]


@pytest.mark.anyio
async def test_the_async_client(running: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.choices[0].message.content == "brave new wörld"
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(text) == "brave new wörld"


def test_prediction_counts(client: openai.OpenAI) -> None:
    answer = ask(client, prediction={"type": "content", "content": "brave new car"})
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2, 1)
    assert ask(client).usage.completion_tokens_details is None


def test_what_the_backend_is_asked(client: openai.OpenAI, backend: FakeBackend) -> None:
    headers = {
        "x-agentspec-session": "s1",
        "x-agentspec-workflow": "w%20%C3%A9",
        "x-agentspec-step": "plan",
        "x-agentspec-speculation": "off",
        "x-agentspec-store": "off",
    }
    extra = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [4]}
    answer = ask(client, temperature=0, seed=7, stop=["x"], extra_headers=headers, extra_body=extra, user="u")
    seen = backend.requests[-1]
    assert seen.labels == Labels("s1", "w é", "plan") and seen.tenant == "default"
    assert (seen.speculation, seen.store, seen.model) == (False, False, MODEL)
    assert (seen.sampling.top_k, seen.sampling.seed, seen.sampling.stop_token_ids) == (3, 7, (4,))
    assert "speculation" not in answer.to_dict()


@pytest.mark.parametrize(
    ("content", "error", "code"),
    [
        ("too long", openai.BadRequestError, "context_length_exceeded"),
        ("busy", openai.RateLimitError, "overloaded"),
        ("bug", openai.InternalServerError, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_keep_their_status(
    client: openai.OpenAI, content: str, error: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    with pytest.raises(error) as caught:
        ask(client, content, stream=stream)
    assert caught.value.code == code and caught.value.request_id
    assert "secret" not in str(caught.value)
    if content == "busy":
        assert caught.value.response.headers["retry-after"] == "3"


@pytest.mark.parametrize(("content", "message"), [("breaks", "the engine broke"), ("crashes", "internal error")])
def test_errors_after_the_first_token_come_as_an_event(client: openai.OpenAI, content: str, message: str) -> None:
    seen = []
    with pytest.raises(openai.APIError, match=message):
        for chunk in ask(client, content, stream=True):
            seen.append(chunk.choices[0].delta.content)
    assert seen == ["one", " two"]


def test_unknown_models(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=HELLO)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"n": 0}, "n"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_refused_fields(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


def test_embeddings_of_a_local_model(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match='does not answer /embeddings; ask a backend with kind = "encoder"'
    ):
        client.embeddings.create(model=MODEL, input="x")


def curl(*arguments: str, body: str | None = None) -> str:
    command = ["curl", "--silent", "--show-error", "--max-time", "20", *arguments]
    command += [] if body is None else ["-H", "content-type: application/json", "--data-binary", "@-"]
    return subprocess.run(command, input=body, capture_output=True, text=True, check=True).stdout


class Held(FakeBackend):
    """Begins its answer, and goes on once `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    async def generate(self, request: GenerateRequest) -> Any:
        self.requests.append(request)
        self.active += 1
        try:
            yield Delta(text="one")
            while not self.go.is_set():
                await anyio.sleep(0.005)
            yield Delta(text=" two", finish_reason="stop")
        except BaseException:
            self.cancelled.append(request)
            raise
        finally:
            self.active -= 1


def test_curl_streams_as_tokens_come(gateway: Any) -> None:
    held = Held()
    running = gateway({MODEL: held})
    body = json.dumps({"model": MODEL, "messages": HELLO, "stream": True})
    command = ["curl", "-sN", f"{running.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        first = next(line for line in process.stdout if "one" in line)
        assert held.active == 1
        held.go.set()
        lines = [first, *(line for line in process.stdout if line.strip())]
    assert [line[:6] for line in lines] == ["data: "] * len(lines) and lines[-1] == "data: [DONE]\n"


def test_curl_shows_headers_and_error_bodies(running: Any) -> None:
    url = f"{running.url}/v1/chat/completions"
    shown = curl("-i", url, "-H", "x-request-id: mine-1", body=json.dumps({"model": MODEL, "messages": HELLO}))
    assert "HTTP/1.1 200" in shown and "x-request-id: mine-1" in shown
    broken = curl("-i", url, body="{")
    assert "HTTP/1.1 400" in broken and '"error":{"message":' in broken
    assert "HTTP/1.1 400" in curl("-i", url, "-d", "{}")  # form-encoded
    stream = curl("-i", "-N", url, body=json.dumps({"model": MODEL, "messages": HELLO, "stream": True}))
    assert "text/event-stream" in stream and "x-accel-buffering: no" in stream


@pytest.mark.parametrize("chunked", [False, True])
def test_curl_meets_the_body_limit(gateway: Any, chunked: bool) -> None:
    small = gateway({MODEL: FakeBackend()}, max_body_bytes=1000)
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x" * 100_000}]})
    arguments = ["-H", "transfer-encoding: chunked"] if chunked else []
    shown = curl("-i", f"{small.url}/v1/chat/completions", *arguments, body=body)
    assert "HTTP/1.1 413" in shown and "request_too_large" in shown


def test_places_are_bounded_and_freed(gateway: Any, until: Callable[..., None]) -> None:
    backend = Held()
    running = gateway({MODEL: backend}, max_concurrent=1, queue_timeout=0)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        stream = ask(client, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            ask(client)
        assert caught.value.response.headers["retry-after"] == "1"
        stream.close()
        until(lambda: backend.active == 0 and running.app.limiter.running == 0)
        assert len(backend.cancelled) == 1
        backend.go.set()
        assert ask(client).choices[0].message.content == "one two"
    counted = {"route": "/v1/chat/completions"}
    assert running.metric("agentspec_requests_total", **counted, model=MODEL, outcome="cancelled") == 1
    assert running.metric("agentspec_requests_total", **counted, model="", outcome="rejected") == 1


def test_the_nearest_deadline_is_answered_first(gateway: Any, until: Callable[..., None]) -> None:
    backend = Held()
    running = gateway({MODEL: backend}, max_concurrent=1, queue_timeout=60)
    with (
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor() as pool,
    ):

        def request(number: int, deadline: float) -> Any:
            headers = {"x-agentspec-session": str(number), "x-agentspec-deadline-s": str(deadline)}
            return ask(client, extra_headers=headers)

        answers = []
        for number, deadline in ((1, 500.0), (2, 500.0), (3, 50.0)):
            answers.append(pool.submit(request, number, deadline))
            until(lambda: running.app.limiter.running == 1 and running.app.limiter.waiting == len(answers) - 1)
        backend.go.set()
        assert [answer.result().choices[0].message.content for answer in answers] == ["one two"] * 3
    assert [seen.labels.session for seen in backend.requests] == ["1", "3", "2"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0.0, 0.05, 0.15])
def test_a_client_that_leaves_frees_its_place(
    gateway: Any, until: Callable[..., None], hanging_up: Any, stream: bool, after: float
) -> None:
    held = Held()
    running = gateway({MODEL: held})
    with hanging_up(running.url, {"model": MODEL, "messages": HELLO, "stream": stream}):
        until(lambda: held.active)
        time.sleep(after)
    until(lambda: held.active == 0 and running.app.limiter.running == 0)
    assert len(held.requests) == len(held.cancelled) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_limit(gateway: Any, until: Callable[..., None], stream: bool) -> None:
    held = Held()
    running = gateway({MODEL: held}, request_timeout=6.0 if stream else 0.5)  # the first word comes within
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        seen = []
        with pytest.raises(openai.APIError, match="request_timeout") as caught:
            answer = ask(client, stream=stream)
            seen.extend(answer)
    if stream:
        assert [chunk.choices[0].delta.content for chunk in seen] == ["one"]
    else:
        assert isinstance(caught.value, openai.InternalServerError) and caught.value.status_code == 504
    until(lambda: held.active == 0)


def test_the_loop_is_free_while_a_backend_computes(gateway: Any) -> None:
    """A backend that computes in its own thread, as the engine does, holds up nobody else."""
    began, end = threading.Event(), threading.Event()

    class Busy(FakeBackend):
        async def generate(self, request: GenerateRequest) -> Any:
            yield Delta(text=str(await anyio.to_thread.run_sync(self.compute)))
            yield Delta(finish_reason="stop")

        def compute(self) -> int:
            began.set()
            total = 0
            while not end.is_set():
                total += sum(range(1000))
            return total

    running = gateway({MODEL: Busy()})
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        thread = threading.Thread(target=ask, args=(client,))
        thread.start()
        assert began.wait(60)
        try:
            for _ in range(5):
                assert httpx.get(f"{running.url}/health", timeout=60).status_code == 200
        finally:
            end.set()
            thread.join()


def test_many_at_once(running: Any) -> None:
    results: list[str] = []

    def one() -> None:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            chunks = ask(client, stream=True)
            results.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))

    threads = [threading.Thread(target=one) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["brave new wörld"] * 16


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = [
    "model", "messages", "prompt", "stream", "stream_options", "temperature", "top_p", "top_k", "n", "stop",
    "max_tokens", "seed", "logit_bias", "logprobs", "top_logprobs", "prediction", "tools", "user", "store", "unknown",
    "continue_final_message", "stop_token_ids",
]  # fmt: skip
VALID = {"model": MODEL, "messages": HELLO, "prompt": "x", "stream": False}


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A valid body with some fields replaced, and now and then some of its bytes."""
    kept = draw(st.sets(st.sampled_from(sorted(VALID))))
    body = {**{name: VALID[name] for name in kept}, **draw(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3))}
    data = bytearray(json.dumps(body).encode())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


@pytest.fixture(scope="module")
def plain(running: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url) as client:
        yield client


@given(bodies(), st.sampled_from(["chat/completions", "completions", "embeddings"]))
def test_no_body_is_a_server_error(plain: httpx.Client, body: bytes, route: str) -> None:
    response = plain.post(f"/v1/{route}", content=body, headers={"content-type": "application/json"})
    assert 200 <= response.status_code < 300 or 400 <= response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    else:
        assert not re.search(r'"error"', response.text)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 1000 + b"]" * 1000,
        b'{"model": "fake", "messages": ' + b'[{"a":' * 1000 + b"1" + b"}]" * 1000 + b"}",
        b'{"model": "fake", "model": "fake", "messages": []}',
        b'{"model": "fake", "temperature": NaN, "messages": []}',
        b"\xff\xfe",
        b'{"model": "' + b"x" * 2000 + b'"}',
        b'{"model": "\\ud800", "messages": []}',
    ],
    ids=["deep-array", "deep-object", "duplicate", "nan", "not-utf8", "long-model", "surrogate"],
)
def test_hostile_bodies(plain: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = plain.post("/v1/chat/completions", content=body, headers=headers)
    assert 400 <= response.status_code < 500 and len(response.content) < 2000


def test_a_name_that_a_client_has_built_in_is_served(gateway: Any) -> None:
    from agentspec.settings.load import Settings

    fake = FakeBackend("ok")
    running = gateway({MODEL: fake}, Settings(backends={}, model_aliases={"gpt-5": MODEL, "claude-*": MODEL}))
    for name, path in (("gpt-5", "chat/completions"), ("claude-haiku-4-5", "messages")):
        asked = {"model": name, "max_tokens": 5, "messages": HELLO}
        answer = httpx.post(f"{running.url}/v1/{path}", json=asked).json()
        assert answer["model"] == name
    assert running.metric("agentspec_requests_total", route="/v1/messages", model=MODEL, outcome="ok") == 1
    listed = httpx.get(f"{running.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [MODEL, "gpt-5"]
    assert httpx.get(f"{running.url}/v1/models/gpt-5").status_code == 200
