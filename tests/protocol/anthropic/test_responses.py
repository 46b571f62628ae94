"""Messages and their events, every one validated by the client's own types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic import types
from pydantic import TypeAdapter

from agentspec.errors import UpstreamError
from agentspec.protocol.anthropic.requests import MessagesRequest
from agentspec.protocol.anthropic.responses import MessagesWriter
from agentspec.protocol.responses import Accumulator
from agentspec.types import Delta, Usage

EVENT: TypeAdapter[Any] = TypeAdapter(types.RawMessageStreamEvent)
USAGE = Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=3)


def call(index: int, name: str | None = None, arguments: str = "", id: str | None = None) -> Delta:
    function = {"arguments": arguments, **({"name": name} if name else {})}
    return Delta(extra={"tool_calls": [{"index": index, **({"id": id} if id else {}), "function": function}]})


def thought(text: str) -> Delta:
    return Delta(extra={"reasoning": text, "reasoning_content": text})


def end(reason: Any = "stop", **fields: Any) -> Delta:
    return Delta(finish_reason=reason, usage=USAGE, **fields)


def events(deltas: Sequence[Delta], **request: Any) -> list[dict[str, Any]]:
    writer = MessagesWriter("m", MessagesRequest({}, stream=True, **request))
    written = [event for delta in deltas for event in writer.chunks(delta)]
    for event in written:
        if event["type"] != "ping":
            shown = EVENT.validate_python(event, strict=True)
            assert shown.type == event["type"]
    return written


def whole(deltas: Sequence[Delta], **request: Any) -> types.Message:
    writer, answer = MessagesWriter("m", MessagesRequest({}, **request)), Accumulator()
    for delta in deltas:
        answer.add(delta)
    return types.Message.model_validate(writer.body(answer), strict=True)


def told(written: Sequence[dict[str, Any]]) -> list[Any]:
    """The content of a stream, put together as clients do."""
    blocks: list[Any] = []
    for event in written:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "open": True, "json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            assert block["open"] and event["index"] == len(blocks) - 1
            name = {"input_json_delta": "json"}.get(delta["type"], delta["type"].removesuffix("_delta"))
            block[name] += delta.get("partial_json", delta.get(name))
        elif event["type"] == "content_block_stop":
            blocks[event["index"]]["open"] = False
    assert not any(block.pop("open") for block in blocks)
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
        del block["json"]
    return blocks


CASES: dict[str, list[Delta]] = {
    "text": [Delta(text="Hi"), Delta(text=" you"), end()],
    "nothing": [end()],
    "blank": [Delta(text="\n\n"), end("length")],
    "thoughts": [thought("a"), thought("b"), Delta(text="\n\n"), Delta(text="c"), end()],
    "call": [
        Delta(text="I look."),
        call(0, "f", "", "c0"),
        call(0, arguments='{"a"'),
        call(0, arguments=": 1}"),
        end("tool_calls"),
    ],
    "calls": [call(0, "f", "{}", "c0"), call(1, "g", '{"b": 2}', "c1"), end("stop")],
    "text between": [call(0, "f", "{}", "c0"), Delta(text="so"), call(1, "g", "{}", "c1"), end("tool_calls")],
    "blank before a call": [Delta(text="\n"), call(0, "f", "{}", "c0"), end("tool_calls")],
    "all at once": [
        Delta(text="Hi", extra={"reasoning": "a", **call(0, "f", "{}", "c0").extra}, finish_reason="tool_calls")
    ],
    "stopped": [Delta(text="a"), end(stop_reason="END")],
}


@pytest.mark.parametrize("name", CASES)
def test_a_stream_tells_what_the_whole_message_does(name: str) -> None:
    written = events(CASES[name])
    assert [event["type"] for event in written[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in written[-2:]] == ["message_delta", "message_stop"]
    message = whole(CASES[name])
    delta = written[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == (message.stop_reason, message.stop_sequence)
    assert message.usage.model_dump(exclude_none=True) == written[-2]["usage"]
    content = [block.model_dump(exclude_none=True) for block in message.content]
    if name != "text between":  # a whole answer of OpenAI's form does not tell where the text was
        assert told(written) == content


def test_calls_in_turns_are_an_error() -> None:
    with pytest.raises(UpstreamError):
        events([call(0, "f", "", "a"), call(1, "g", "", "b"), call(0, arguments="{}")])
    with pytest.raises(UpstreamError):
        events([call(0, arguments="{}")])
