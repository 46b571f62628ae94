from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from agentspec.backends.base import Backend
from agentspec.backends.http import httpx
from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.openai import backend as backend_module
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import UpstreamError, UpstreamStatusError
from agentspec.protocol.wire import MAX_EVENT_BYTES
from agentspec.types import Delta, GenerateRequest, Labels, Usage

pytestmark = pytest.mark.anyio
REQUEST = GenerateRequest(model="m", messages=[{"role": "user", "content": "hi"}])
EVENTS: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None},
    {"choices": [{"index": 0, "delta": {"content": "Hal"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "lo é"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
]


class Chunks(httpx.AsyncByteStream):
    """A body in pieces; an exception among them is raised, a number is slept. Notes whether it was closed."""

    def __init__(self, pieces: Sequence[bytes | Exception | float]) -> None:
        self._pieces = pieces
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, bytes):
                yield piece
            else:
                await anyio.sleep(piece)

    async def aclose(self) -> None:
        self.closed = True


def events(*values: dict[str, Any], done: bool = True) -> list[bytes]:
    lines = [b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n" for value in values]
    return [*lines, b"data: [DONE]\n\n"] if done else lines


def backend(
    body: Sequence[bytes | Exception | float] | Chunks,
    *,
    status: int = 200,
    content_type: str = "text/event-stream",
    headers: dict[str, str] | None = None,
    seen: Callable[[httpx.Request], None] = lambda request: None,
) -> OpenAIBackend:
    def answer(request: httpx.Request) -> httpx.Response:
        seen(request)
        stream = body if isinstance(body, Chunks) else Chunks(body)
        return httpx.Response(status, headers={"content-type": content_type, **(headers or {})}, stream=stream)

    settings = OpenAISettings(base_url="http://upstream.test/v1", model="own", server_kind="other")  # type: ignore[arg-type]
    return OpenAIBackend(settings, transport=httpx.MockTransport(answer))


async def collect(upstream: OpenAIBackend, request: GenerateRequest = REQUEST) -> list[Delta]:
    async with aclosing(upstream.generate(request)) as deltas:
        return [delta async for delta in deltas]


async def test_a_stream_becomes_deltas() -> None:
    seen: list[httpx.Request] = []
    upstream = backend(events(*EVENTS), seen=seen.append)
    deltas = await collect(upstream, GenerateRequest(model="m", text="x", labels=Labels(step="plan")))
    assert isinstance(upstream, Backend)
    assert "".join(delta.text for delta in deltas) == "Hallo é"
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "stop"]
    assert deltas[-1].usage == Usage(3, 2)
    assert seen[-1].headers["x-agentspec-step"] == "plan" and json.loads(seen[-1].content)["model"] == "m"


async def test_the_same_deltas_for_one_byte_chunks() -> None:
    wire = b"".join(events(*EVENTS))
    expected = await collect(backend([wire]))
    assert await collect(backend([wire[i : i + 1] for i in range(len(wire))])) == expected


async def test_the_settings_model_stands_in_for_none() -> None:
    seen: list[httpx.Request] = []
    await collect(backend(events(*EVENTS), seen=seen.append), GenerateRequest(model="", text="x"))
    assert json.loads(seen[-1].content)["model"] == "own"


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
async def test_an_error_answer_is_kept_whole(status: int) -> None:
    body = b'{"error": {"message": "no such luck"}}'
    upstream = backend([body], status=status, content_type="application/json", headers={"Retry-After": "7"})
    with pytest.raises(UpstreamStatusError, match="no such luck") as caught:
        await collect(upstream)
    assert (caught.value.status, caught.value.upstream_body) == (status, body)
    assert caught.value.headers["retry-after"] == "7"
    with pytest.raises(UpstreamStatusError):
        await upstream.models()


async def test_room_is_asked_for_a_large_answer_that_is_no_stream() -> None:
    message = {"role": "assistant", "content": "x" * 100_000}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
    upstream, asked = backend([body[:80_000], body[80_000:]], content_type="application/json"), list[int]()

    async def room(size: int) -> None:
        asked.append(size)

    async with upstream.forward("POST", "/chat/completions", headers={}) as response:
        told = [delta async for delta in upstream.deltas(response, room)]
    assert [len(delta.text) for delta in told] == [100_000]
    assert sum(asked) == len(body) - 65536


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("half", [b"", b'{"choices'])
async def test_the_last_event_needs_no_blank_line(end: bytes, half: bytes) -> None:
    *pieces, last = events(*EVENTS, done=False)
    whole = await collect(backend([*pieces, last]))
    assert await collect(backend([*pieces, last.rstrip(b"\n") + end])) == whole
    assert await collect(backend([*pieces, last, b"data: " + half + end])) == whole
    assert await collect(backend([*pieces, last, b"data: [DONE]" + end])) == whole
    with pytest.raises(UpstreamError):
        await collect(backend([*pieces, last.rstrip(b"\n"), httpx.ReadError("reset")]))


@pytest.mark.parametrize("cut", range(4))
async def test_a_stream_cut_before_its_finish_is_an_error(cut: int) -> None:
    with pytest.raises(UpstreamError):
        await collect(backend(events(*EVENTS[:cut], done=False)))
    with pytest.raises(UpstreamError):
        await collect(backend([*events(*EVENTS[:cut], done=False), httpx.ReadError("reset")]))


@pytest.mark.parametrize("reason", ["abort", "error", "insufficient_system_resource"])
async def test_an_answer_that_the_server_broke_off_is_an_error(reason: str) -> None:
    broken = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    with pytest.raises(UpstreamError, match="before it was finished"):
        await collect(backend(events(*EVENTS[:3], broken, EVENTS[4])))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([b"data: {not json}\n\n"], "not JSON"),
        ([b"data: [1]\n\n"], "wrong shape"),
        ([b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'], "out of memory"),
        ([b"data: " + b"x" * MAX_EVENT_BYTES], f"more than {MAX_EVENT_BYTES} bytes"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], "not JSON"),
    ],
)
async def test_malformed_streams(pieces: list[bytes], message: str) -> None:
    with pytest.raises(UpstreamError, match=message):
        await collect(backend(pieces))


TOKEN = {"token": "a", "logprob": -1.0}


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"content": "x" * 200}},
        {"delta": {"reasoning_content": "x" * 200}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "x" * 200}}]}},
        {"delta": {"content": "x" * 200}, "finish_reason": "stop"},
        {"delta": {}, "logprobs": {"content": [{**TOKEN, "top_logprobs": [TOKEN] * 10}]}},
        {"delta": {}, "token_ids": [1] * 25},
    ],
    ids=["text", "thoughts", "calls", "after the end", "probabilities", "tokens"],
)
async def test_an_answer_in_pieces_is_bounded_as_a_whole_one_is(
    choice: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "MAX_ANSWER_BYTES", 1500)
    few, many = ([{"choices": [{"index": 0, **choice}]}] * count for count in (3, 9))
    assert await collect(backend(events(*few, EVENTS[3])))
    with pytest.raises(UpstreamError, match="more than 1500 bytes"):
        await collect(backend(events(*many, EVENTS[3])))


async def test_cancelling_closes_the_connection() -> None:
    body = Chunks([60.0])
    with anyio.move_on_after(1):
        await collect(backend(body))
    assert body.closed


async def test_models() -> None:
    listed = {"data": [{"id": "a"}, {"id": 3}, "b"]}
    upstream = backend([json.dumps(listed).encode()], content_type="application/json")
    assert await upstream.models() == [{"id": "a"}]
    with pytest.raises(UpstreamError, match="without a list"):
        await backend([b"{}"], content_type="application/json").models()
    await upstream.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b'{"data": 5}',
        b'{"data": [5]}',
        b'{"data": [{"embedding": "x"}]}',
        b'{"data": [{}',
        b'{"data": [{"embedding": [1]}]}',
        b'{"data": [{"embedding": [1]}, {"embedding": [1]}, {"embedding": [1]}]}',
        b'{"data": [{"embedding": [1]}, {"embedding": [1, 2]}]}',
        b'{"data": [{"embedding": []}, {"embedding": []}]}',
        b'{"data": [{"embedding": [1, 2]}, {"embedding": [1, NaN]}]}',
        b'{"data": [{"embedding": [1, 2]}, {"embedding": [1, -1e999]}]}',
    ],
)
async def test_what_holds_no_vectors_is_the_upstreams_mistake(answer: bytes) -> None:
    with pytest.raises(UpstreamError, match="vectors"):
        await backend([answer], content_type="application/json").embed(["x", "y"], "m")
