"""Answers, and how each API writes them as a stream and whole; the clients' own types read what is written.

`python tests/protocol/test_golden_answers.py` writes what is written now into the file: look at the difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentspec.errors import UpstreamError
from agentspec.protocol.anthropic.requests import MessagesRequest
from agentspec.protocol.anthropic.responses import MessagesWriter
from agentspec.protocol.completions import CompletionWriter
from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.openai_responses.request import parse_responses
from agentspec.protocol.requests import AnswerFormat
from agentspec.protocol.responses import ApiWriter, ChatWriter
from agentspec.protocol.wire import encode
from agentspec.types import Delta, GenerateRequest, Prompt, SamplingParams, Speculation, TokenLogprob, Usage

FILE = Path(__file__).parent / "golden" / "answers.jsonl"
TYPES: dict[str, tuple[Any, Any]] = {  # of completions the client's has no null for an end to come
    "chat": (TypeAdapter(ChatCompletionChunk), TypeAdapter(ChatCompletion)),
    "messages": (TypeAdapter(RawMessageStreamEvent), TypeAdapter(Message)),
    "responses": (TypeAdapter(ResponseStreamEvent), TypeAdapter(Response)),
}
CASES = [json.loads(line) for line in FILE.read_text().splitlines()]
# Whole answers that differ from their streams: no text stands between calls, and calls that must not run are texts.
APART = {
    "text between",
    "blank between",
    "cut",
    "cut before",
    "filtered call",
    "call with no number",
    "one in turns cut",
}


def token(text: str, id: int, logprob: float, *top: list[Any]) -> TokenLogprob:
    return TokenLogprob(id, text, logprob, tuple(token(*one) for one in top))


def delta(given: dict[str, Any]) -> Delta:
    """A `Delta` of JSON: its parts by the names of their fields, a token as [text, id, logprob, *top]."""
    made: dict[str, Any] = dict(given)
    if prompt := made.get("prompt"):
        made["prompt"] = Prompt(prompt.get("text", ""), tuple(prompt["token_ids"]))
    made["logprobs"] = tuple(token(*one) for one in given.get("logprobs", ()))
    made["token_ids"] = tuple(given.get("token_ids", ()))
    made["usage"] = Usage(*given["usage"]) if "usage" in given else None
    made["speculation"] = Speculation(*given["speculation"]) if "speculation" in given else None
    return Delta(**made)


def writer(api: str, options: dict[str, Any]) -> ApiWriter:
    if api == "responses":
        return EventWriter(parse_responses({"model": "m", "input": "hi", **options}))
    if api == "messages":
        return MessagesWriter("m", MessagesRequest(**options))
    prompt: dict[str, Any] = {"messages": []} if api == "chat" else {"text": "p"}
    named = {name: options[name] for name in ("n", "logprobs") if name in options}
    form = AnswerFormat(**{name: value for name, value in options.items() if name not in named})
    kind = ChatWriter if api == "chat" else CompletionWriter
    return kind(GenerateRequest("m", **prompt, sampling=SamplingParams(**named)), form)


def written(api: str, options: dict[str, Any], deltas: list[Delta]) -> dict[str, Any]:
    """The stream and the whole answer, without ids and times, which the client's types have read."""
    streaming, writing = (writer(api, options) for _ in range(2))
    stream = [chunk for one in deltas for chunk in streaming.chunks(one)]
    stream += [*streaming.close(), *streaming.last()]
    for one in deltas:
        writing.add(one)
    list(writing.close())
    whole = writing.body()
    for kind, values in zip(TYPES.get(api, ()), (stream, [whole]), strict=False):
        for value in values:
            assert value.get("type") == "ping" or kind.validate_python(value)
    plain = re.sub(r'_?[0-9a-f]{32}|(?<="(?:created)": )\d+|(?<=d_at": )\d+', "0", json.dumps([stream, whole]))
    return dict(zip(("stream", "whole"), json.loads(plain), strict=True))


of_each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['api']}: {case['name']}")


@of_each_case
def test_streams_and_whole_answers_equal_the_transcripts(case: dict[str, Any]) -> None:
    assert written(case["api"], case["options"], [*map(delta, case["deltas"])]) == case["written"]


def sse(api: str, events: list[dict[str, Any]]) -> bytes:
    named = ("event: {type}\n" if api in ("messages", "responses") else "", "")
    blocks = [f"{named[0].format(**event)}data: {json.dumps(event)}\n\n" for event in events]
    return "".join(blocks if named[0] else [*blocks, "data: [DONE]\n\n"]).encode()


def client(kind: Callable[..., Any], api: str, answers: dict[str, Any]) -> Any:
    """The unmodified client, to whose requests the golden transcript is the answer."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        if not json.loads(request.content).get("stream"):
            return httpx2.Response(200, json=answers["whole"])
        return httpx2.Response(200, content=sse(api, answers["stream"]), headers={"content-type": "text/event-stream"})

    http = httpx2.Client(transport=httpx2.MockTransport(answer))
    return kind(api_key="k", base_url="http://gateway/v1", http_client=http, max_retries=0)


@of_each_case
def test_the_clients_read_every_transcript(case: dict[str, Any]) -> None:
    api, answers = case["api"], case["written"]
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with client(anthropic.Anthropic if api == "messages" else openai.OpenAI, api, answers) as sdk:
        if api == "messages":
            create, asked["max_tokens"] = sdk.messages.create, 9
        elif api == "responses":
            create, asked = sdk.responses.create, {"model": "m", "input": "hi"}
        elif api == "chat":
            create = sdk.chat.completions.create
        else:
            create, asked = sdk.completions.create, {"model": "m", "prompt": "p"}
        read = [event.to_dict() for event in create(**asked, stream=True)]
        assert read == [event for event in answers["stream"] if event.get("type") != "ping"]
        assert create(**asked).to_dict() == answers["whole"]
        if api == "messages" and case["name"] not in APART:
            with sdk.messages.stream(**asked) as stream:
                final = json.loads(stream.get_final_message().to_json(exclude_unset=False, exclude_none=True))
            whole = Message.model_validate(answers["whole"])
            assert [block["type"] for block in final["content"]] == [block.type for block in whole.content]
            for name in ("content", "stop_reason", "usage"):
                assert final.get(name) == whole.to_dict(exclude_none=True).get(name), name


def test_a_piece_of_a_call_that_ended_or_never_began_is_an_error_of_messages() -> None:
    def call(index: int, **function: str) -> Delta:
        return Delta(extra={"tool_calls": [{"index": index, "id": f"c{index}", "function": function}]})

    for deltas in ([call(0, name="f", arguments="{}"), call(1, name="g"), call(0, arguments="}")], [call(0)]):
        writer = MessagesWriter("m", MessagesRequest())
        with pytest.raises(UpstreamError):
            [event for one in deltas for event in writer.chunks(one)]


@given(st.lists(st.lists(st.text(max_size=3), max_size=3), min_size=1, max_size=4))
def test_text_offsets_run_through_the_chunks(words: list[list[str]]) -> None:
    writing, whole = (writer("completion", {"logprobs": True}) for _ in range(2))
    offsets: list[int] = []
    for group in words:
        one = Delta(text="".join(group), logprobs=tuple(TokenLogprob(0, word, -1.0) for word in group))
        whole.add(one)
        for chunk in writing.chunks(one):
            offsets += chunk["choices"][0]["logprobs"]["text_offset"]
    tokens = [word for group in words for word in group]
    assert offsets == [sum(len(word) for word in tokens[:i]) for i in range(len(tokens))]
    [choice] = whole.body()["choices"]
    assert choice["text"] == "".join(tokens) and choice["logprobs"]["text_offset"] == offsets


def test_json_is_always_text() -> None:
    assert encode({"a": "é\ud800"}) == '{"a":"é?"}'.encode()
    with pytest.raises(ValueError):
        encode(float("inf"))


def main() -> None:
    for case in CASES:
        case["written"] = written(case["api"], case["options"], [*map(delta, case["deltas"])])
    FILE.write_text("".join(f"{json.dumps(case)}\n" for case in CASES))


if __name__ == "__main__":
    main()
