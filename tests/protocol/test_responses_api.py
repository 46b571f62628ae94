"""The Responses API: items as messages of chats and answers as events; nothing is lost on the way, however it came."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from agentspec.protocol.messages import parse_message
from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.openai_responses.request import Conversation, Item, parse_input, parse_responses
from agentspec.protocol.tools import ToolNames, key_of
from agentspec.types import Delta, FinishReason, Usage

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SHORT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)


def messages(value: Any) -> list[dict[str, Any]]:
    made = Conversation()
    made.add_all(parse_input(value))
    return made.finish()


called = st.builds(
    lambda name, arguments: {"type": "function_call", "name": name, "arguments": arguments}, texts, texts
)
items = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), texts),
    st.builds(
        lambda parts: {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": t} for t in parts],
        },
        st.lists(texts, min_size=1, max_size=3),
    ),
    st.builds(
        lambda text: {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}, texts
    ),
    called,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Item]:
    """Items in any order, each call with an id of its own and, later, a result."""
    drawn: list[Item] = []
    for number, item in enumerate(draw(st.lists(items, max_size=8))):
        if item.get("type") == "function_call":
            item = {**item, "call_id": f"c{number}"}
            result = {"type": "function_call_output", "call_id": f"c{number}", "output": draw(texts)}
            drawn += [item, result] if draw(st.booleans()) else [item]
        else:
            drawn.append(item)
    return drawn


@given(conversations())
def test_every_text_arrives_once_and_in_order(given_items: list[Item]) -> None:
    parsed = parse_input(given_items)
    for item in parsed:
        ITEM.validate_python(item)
    assert parse_input(parsed) == parsed, "the normal form stays as it is"
    made = Conversation()
    made.add_all(parsed)
    found = [parse_message(message, "m") for message in made.finish()]
    assert _texts(found) == _wanted(parsed, made.names)


def _wanted(parsed: list[Item], names: ToolNames) -> dict[str, str]:
    """All texts of a kind in the order in which they come; tools by their names in the chat."""
    kinds: dict[str, str] = dict.fromkeys(("user", "assistant", "thought", "call", "result"), "")
    for item in parsed:
        if item["type"] == "message":
            kinds[item["role"]] += "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            kinds["thought"] += item["content"][0]["text"]
        elif item["type"] == "function_call":
            name = names.of_key(key_of(item["name"], None))
            kinds["call"] += f"{item['call_id']}{name}{item['arguments']}"
        else:
            kinds["result"] += item["call_id"] + item["output"]
    return kinds


def _texts(found: list[dict[str, Any]]) -> dict[str, str]:
    kinds: dict[str, str] = dict.fromkeys(("user", "assistant", "thought", "call", "result"), "")
    for message in found:
        if message["role"] == "tool":
            kinds["result"] += message["tool_call_id"] + message["content"]
            continue
        kinds[message["role"]] += message["content"]
        kinds["thought"] += message.get("reasoning_content", "")
        for call in message.get("tool_calls", ()):
            kinds["call"] += f"{call['id']}{call['function']['name']}{call['function']['arguments']}"
    return kinds


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"patch": "x\\ny"}', "x\ny"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ("ls -l", "ls -l"),
        ('{"input": "cut of', '{"input": "cut of'),
        ('{"input": "\\ud83d\\ude00 \\\\ud83d"}', "\U0001f600 \\ud83d"),
        ('{"input": "x", "more": "y"}', "x"),
        ('{"input": "lone \\ud800 half"}', "lone \ufffd half"),
        ("", ""),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_any_arguments_become_the_input_of_a_custom_tool(written: str, text: str) -> None:
    called = [{"index": 0, "id": "c", "function": {"name": "edit", "arguments": written}}]
    writer = EventWriter(parse_responses({"input": "hi", "tools": [{"type": "custom", "name": "edit"}]}))
    writer.add(Delta(extra={"tool_calls": called}, finish_reason="tool_calls"))
    list(writer.close())
    assert writer.body()["output"][0]["input"] == text


EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def writer(**fields: Any) -> EventWriter:
    body = {"model": "m", "input": "hi", **fields}
    return EventWriter(parse_responses(body))


def events(deltas: list[Delta], **fields: Any) -> list[dict[str, Any]]:
    one = writer(**fields)
    found = [*(event for delta in deltas for event in one.chunks(delta)), *one.close(), *one.last()]
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
        pieces = draw(st.lists(SHORT, min_size=1, max_size=4))
        found += [thought(piece) if kind == "thought" else Delta(text=piece) for piece in pieces]
    count = draw(st.integers(0, 3))
    found += [call(index, "", id=f"c{index}", name=f"f{index}") for index in range(count)]
    if count:
        found += [call(draw(st.integers(0, count - 1)), draw(SHORT)) for _ in range(draw(st.integers(0, 6)))]
    finish: FinishReason = draw(st.sampled_from(["stop", "length", "tool_calls", "content_filter"]))
    return [*found, Delta(finish_reason=finish, usage=Usage(2, 3))]


@given(answers())
def test_every_event_is_valid_and_together_they_are_the_response(deltas: list[Delta]) -> None:
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


@given(SHORT, st.lists(st.integers(0, 60), max_size=5))
def test_the_input_of_a_custom_tool_comes_in_pieces(written: str, at: list[int]) -> None:
    arguments = json.dumps({"input": written})
    ends = [0, *sorted(one % (len(arguments) + 1) for one in at), len(arguments)]
    pieces = [call(0, arguments[begin:end]) for begin, end in pairwise(ends)]
    tools = [{"type": "namespace", "name": "disk", "description": "", "tools": [{"type": "custom", "name": "edit"}]}]
    deltas = [call(0, "", id="a", name="disk__edit"), *pieces, Delta(finish_reason="tool_calls")]
    found = events(deltas, tools=tools)
    sent = "".join(event["delta"] for event in found if event["type"] == "response.custom_tool_call_input.delta")
    [done] = [event for event in found if event["type"] == "response.custom_tool_call_input.done"]
    [item] = found[-1]["response"]["output"]
    assert sent == done["input"] == item["input"] == written
    assert (item["type"], item["name"], item["namespace"]) == ("custom_tool_call", "edit", "disk")
