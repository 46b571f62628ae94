"""The events of an answer: valid by the client's own types, complete, and true to the answer however it came."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.openai_responses.request import parse_responses
from agentspec.types import Delta, FinishReason, Usage

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)


def writer(**fields: Any) -> EventWriter:
    body = {"model": "m", "input": "hi", **fields}
    return EventWriter(parse_responses(body))


def events(deltas: list[Delta], **fields: Any) -> list[dict[str, Any]]:
    one = writer(**fields)
    found = [*one.begin(), *(event for delta in deltas for event in one.write(delta)), *one.close(), one.last()]
    for number, event in enumerate(found):
        assert event["sequence_number"] == number and EVENT.validate_python(event).type == event["type"]
    Response.model_validate(found[-1]["response"])
    return found


def thought(text: str) -> Delta:
    return Delta(extra={"reasoning": text, "reasoning_content": text})


def call(index: int, arguments: str, **head: str) -> Delta:
    name = {"name": head["name"]} if "name" in head else {}
    piece = {"index": index, **({"id": head["id"]} if "id" in head else {})}
    return Delta(extra={"tool_calls": [{**piece, "function": {**name, "arguments": arguments}}]})


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    """Thoughts, text and calls as they come, also in turn; pieces of several calls mixed."""
    found: list[Delta] = []
    for kind in draw(st.lists(st.sampled_from(["thought", "text"]), max_size=4)):
        pieces = draw(st.lists(texts, min_size=1, max_size=4))
        found += [thought(piece) if kind == "thought" else Delta(text=piece) for piece in pieces]
    count = draw(st.integers(0, 3))
    found += [call(index, "", id=f"c{index}", name=f"f{index}") for index in range(count)]
    if count:
        found += [call(draw(st.integers(0, count - 1)), draw(texts)) for _ in range(draw(st.integers(0, 6)))]
    finish: FinishReason = draw(st.sampled_from(["stop", "length", "tool_calls", "content_filter"]))
    return [*found, Delta(finish_reason=finish, usage=Usage(2, 3))]


@given(answers())
def test_every_event_is_valid_and_tells_the_whole(deltas: list[Delta]) -> None:
    found = events(deltas)
    whole = found[-1]["response"]
    output = whole["output"]
    added = [event for event in found if event["type"] == "response.output_item.added"]
    done = [event for event in found if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == list(range(len(output)))
    assert {event["output_index"]: event["item"] for event in done} == dict(enumerate(output))
    for index, item in enumerate(output):
        pieces = "".join(e["delta"] for e in found if e["type"].endswith(".delta") and e["output_index"] == index)
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert pieces == text and {e.get("item_id", item["id"]) for e in found if e.get("output_index") == index} == {
            item["id"]
        }
    said = "".join(delta.text for delta in deltas)
    assert "".join(item["content"][0]["text"] for item in output if item["type"] == "message") == said
    assert whole["status"] == (
        "incomplete" if deltas[-1].finish_reason in ("length", "content_filter") else "completed"
    )
    assert whole["status"] in found[-1]["type"] and output


@given(texts, st.lists(st.integers(0, 60), max_size=5))
def test_the_input_of_a_custom_tool_comes_in_pieces(written: str, at: list[int]) -> None:
    arguments = json.dumps({"input": written})
    ends = [0, *sorted(one % (len(arguments) + 1) for one in at), len(arguments)]
    pieces = [call(0, arguments[begin:end]) for begin, end in pairwise(ends)]
    tools = [{"type": "namespace", "name": "disk", "description": "", "tools": [{"type": "custom", "name": "edit"}]}]
    deltas = [call(0, "", id="a", name="disk__edit"), *pieces, Delta(finish_reason="tool_calls")]
    found = events(deltas, tools=tools)
    told = "".join(event["delta"] for event in found if event["type"] == "response.custom_tool_call_input.delta")
    [done] = [event for event in found if event["type"] == "response.custom_tool_call_input.done"]
    [item] = found[-1]["response"]["output"]
    assert told == done["input"] == item["input"] == written
    assert (item["type"], item["name"], item["namespace"]) == ("custom_tool_call", "edit", "disk")


def test_a_failed_answer_has_what_was_written() -> None:
    one = writer()
    found = [*one.begin(), *one.write(Delta(text="half"))]
    last = one.fail("server_error", "it broke")
    assert EVENT.validate_python(last).response.error.message == "it broke"
    assert last["response"]["output"][0]["content"][0]["text"] == "half" and last["sequence_number"] == len(found)
