from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import anyio
import httpx2 as httpx
import pytest

from agentspec.backends.base import Backend
from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import InvalidRequestError, UpstreamError
from agentspec.types import Delta, GenerateRequest, Labels, SamplingParams, StructuredOutputs, Usage

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
        self.pieces = pieces
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
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
async def test_a_streamed_answer_is_bounded_in_bytes(choice: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.backends.openai.backend.MAX_ANSWER_BYTES", 1500)  # 64 MiB take too long
    few, many = ([{"choices": [{"index": 0, **choice}]}] * count for count in (3, 9))
    assert await collect(backend(events(*few, EVENTS[3])))
    with pytest.raises(UpstreamError, match="more than 1500 bytes"):
        await collect(backend(events(*many, EVENTS[3])))


# The body that is sent.


async def sent(**fields: Any) -> tuple[str, dict[str, Any]]:
    """Path and body of a request with these fields."""
    seen: list[httpx.Request] = []
    given = {"model": "m", **({} if fields.keys() & {"text", "token_ids"} else {"messages": REQUEST.messages})}
    with suppress(UpstreamError):
        await collect(backend([], seen=seen.append), GenerateRequest(**{**given, **fields}))
    return seen[-1].url.path, json.loads(seen[-1].content)


DEFAULTS = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}


async def test_only_what_differs_from_the_defaults_is_sent() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert await sent() == ("/v1/chat/completions", DEFAULTS | {"messages": messages})
    assert await sent(text="p") == ("/v1/completions", DEFAULTS | {"prompt": "p"})
    assert await sent(token_ids=[1, 2]) == ("/v1/completions", DEFAULTS | {"prompt": [1, 2]})
    assert (await sent(model="", text="p"))[1]["model"] == "own"  # the settings'


async def test_a_default_that_was_given_is_sent() -> None:
    """A server may have another one, as vLLM has the model's own temperature; `replace` leaves out what was not set."""
    numbers = {"temperature": 1.0, "top_p": 1, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    numbers |= {"presence_penalty": 0, "frequency_penalty": 0.0}
    assert SamplingParams(**numbers) == SamplingParams()  # type: ignore[arg-type]
    for name, value in numbers.items():
        given: dict[str, Any] = {name: value}
        for sampling in (SamplingParams(**given), replace(SamplingParams(seed=1), **given)):
            _, body = await sent(sampling=replace(sampling, seed=2, n=1, stop=()))
            assert {one: body[one] for one in (*numbers, "stop", "n") if one in body} == given


async def test_every_sampling_field_is_sent() -> None:
    given: dict[str, Any] = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1}
    given |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "seed": 0, "max_tokens": 9, "min_tokens": 4}
    given |= {"logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    lists = {"stop": ["a", "b"], "stop_token_ids": [1, 2], "bad_words": ["x"]}
    sampling = SamplingParams(
        **given,
        **{name: tuple(one) for name, one in lists.items()},  # type: ignore[arg-type]
        logit_bias={7: 2.0},
        structured_outputs=StructuredOutputs(regex="a"),
    )
    _, body = await sent(sampling=sampling)
    found = {name: body[name] for name in SamplingParams.__dataclass_fields__ if name != "n"}
    assert found == {**given, **lists, "logit_bias": {"7": 2.0}, "structured_outputs": {"regex": "a"}}
    _, body = await sent(text="p", sampling=sampling)
    assert body["logprobs"] == 2 and "top_logprobs" not in body


TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"name": "answer", "schema": {"type": "object"}}
TRANSLATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "continued": ({"continue_final": True}, {"continue_final_message": True, "add_generation_prompt": False}),
    "extra fields": (
        {"extra": {"tools": [1], "stream": False, "model": "x", "stream_options": None}},
        DEFAULTS | {"tools": [1]},
    ),
    "a prediction": ({"prediction": "t", "extra": {"prediction": "p"}}, {"prediction": "p"}),
    "a prediction for us": ({"prediction": "t"}, {"prediction": None}),
    "an object": ({"json_object": True}, {"response_format": {"type": "json_object"}}),
    "a schema": (
        {"json": {"type": "object"}},
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    ),
    "a choice": ({"choice": ("a", "b")}, {"structured_outputs": {"choice": ["a", "b"]}}),
    "tools": ({"tools": (TOOL,)}, {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": None}),
    "one tool": (
        {"tools": (TOOL,), "tool_choice": "f", "parallel_tool_calls": False},
        {"tool_choice": TOOL, "parallel_tool_calls": False},
    ),
    "the prompt": (
        {"start_answer": False, "return_prompt": True, "split_reasoning": False, "template_arguments": {"a": 1}},
        # with include_reasoning = false, vLLM would leave the thoughts out of the raw text
        {"add_generation_prompt": False, "return_token_ids": True, "include_reasoning": None}
        | {"chat_template_kwargs": {"a": 1}},
    ),
}


@pytest.mark.parametrize(("given", "expected"), TRANSLATED.values(), ids=TRANSLATED)
async def test_fields_are_sent_in_the_form_of_openai_or_else_of_vllm(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    if given.keys() <= {"json_object", "json", "choice"}:
        given = {"sampling": SamplingParams(structured_outputs=StructuredOutputs(**given))}
    _, body = await sent(**given)
    assert {name: body.get(name) for name in expected} == expected


async def test_more_choices_than_one_are_refused() -> None:
    for given in ({"extra": {"n": 2}}, {"sampling": SamplingParams(n=2)}):
        with pytest.raises(InvalidRequestError, match="one answer at a time") as caught:
            await sent(**given)
        assert caught.value.param == "n"
