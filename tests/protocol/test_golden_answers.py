"""Answers, and how each API writes them as a stream and whole; the clients' own types read what is written.

`python tests/protocol/test_golden_answers.py` writes what is written now into the file: look at the difference.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentspec.protocol.anthropic.requests import MessagesRequest
from agentspec.protocol.anthropic.responses import MessagesWriter
from agentspec.protocol.completions import CompletionWriter
from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.openai_responses.request import parse_responses
from agentspec.protocol.requests import AnswerFormat
from agentspec.protocol.responses import Accumulator, ChatWriter, ResponseWriter
from agentspec.types import Delta, GenerateRequest, Prompt, SamplingParams, Speculation, TokenLogprob, Usage

FILE = Path(__file__).parent / "golden" / "answers.jsonl"
TYPES: dict[str, tuple[Any, Any]] = {  # of completions the client's has no null for an end to come
    "chat": (TypeAdapter(ChatCompletionChunk), TypeAdapter(ChatCompletion)),
    "messages": (TypeAdapter(RawMessageStreamEvent), TypeAdapter(Message)),
    "responses": (TypeAdapter(ResponseStreamEvent), TypeAdapter(Response)),
}
CASES = [json.loads(line) for line in FILE.read_text().splitlines()]


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


def writer(api: str, options: dict[str, Any], *, stream: bool) -> ResponseWriter:
    if api == "messages":
        return MessagesWriter("m", MessagesRequest({}, stream=stream, **options))
    prompt: dict[str, Any] = {"messages": []} if api == "chat" else {"text": "p"}
    named = {name: options[name] for name in ("n", "logprobs") if name in options}
    form = AnswerFormat(**{name: value for name, value in options.items() if name not in named}, stream=stream)
    kind = ChatWriter if api == "chat" else CompletionWriter
    return kind(GenerateRequest("m", **prompt, sampling=SamplingParams(**named)), form)


def written(api: str, options: dict[str, Any], deltas: list[Delta]) -> dict[str, Any]:
    """The stream and the whole answer, without ids and times, which the client's types have read."""
    answer, stream = Accumulator(), list[dict[str, Any]]()
    if api == "responses":
        events = EventWriter(parse_responses({"model": "m", "input": "hi", **options}))
        stream += [*events.begin(), *(event for one in deltas for event in events.write(one)), *events.close()]
        stream.append(events.last())
        whole = events.response
    else:
        streaming = writer(api, options, stream=True)
        stream += [chunk for one in deltas for chunk in streaming.chunks(one)]
        for one in deltas:
            answer.add(one)
        whole = writer(api, options, stream=False).body(answer)
    for kind, values in zip(TYPES.get(api, ()), (stream, [whole]), strict=False):
        for value in values:
            assert value.get("type") == "ping" or kind.validate_python(value)
    plain = re.sub(r'_?[0-9a-f]{32}|(?<="(?:created)": )\d+|(?<=d_at": )\d+', "0", json.dumps([stream, whole]))
    return dict(zip(("stream", "whole"), json.loads(plain), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['api']}: {case['name']}")
def test_what_is_written(case: dict[str, Any]) -> None:
    assert written(case["api"], case["options"], [*map(delta, case["deltas"])]) == case["written"]


def main() -> None:
    for case in CASES:
        case["written"] = written(case["api"], case["options"], [*map(delta, case["deltas"])])
    FILE.write_text("".join(f"{json.dumps(case)}\n" for case in CASES))


if __name__ == "__main__":
    main()
