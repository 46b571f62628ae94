"""Items of the Responses API as messages of chats: what belongs together, and that nothing is lost on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from agentspec.protocol.messages import parse_message
from agentspec.protocol.openai_responses.request import Conversation, Item, parse_input, parse_responses
from agentspec.protocol.tool_names import ToolNames, key_of

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def messages(value: Any) -> list[dict[str, Any]]:
    made = Conversation()
    made.add_all(parse_input(value))
    return made.finish()


def test_ids_of_calls_and_items_may_be_long() -> None:
    """As of servers that hide a signature in them, whose answers come back with them."""
    long = "call_" + "x" * 5000
    call = {"type": "function_call", "id": long, "call_id": long, "name": "f", "arguments": "{}"}
    turn, result = messages([call, {"type": "function_call_output", "call_id": long, "output": "1"}])
    assert turn["tool_calls"][0]["id"] == result["tool_call_id"] == long


@given(texts, texts)
def test_calls_of_custom_tools_are_calls_of_functions(written: str, result: str) -> None:
    head = {"call_id": "a", "name": "edit", "namespace": "disk"}
    value = [
        {"type": "custom_tool_call", **head, "input": written},
        {"type": "custom_tool_call_output", "call_id": "a", "output": result, "name": "edit"},
    ]
    items = parse_input(value)
    for item in items:
        ITEM.validate_python(item)
    assert parse_input(items) == items
    [call], output = messages(value)[0]["tool_calls"], messages(value)[1]
    assert call["function"]["name"] == "disk__edit" and json.loads(call["function"]["arguments"]) == {"input": written}
    assert output == {"role": "tool", "tool_call_id": "a", "content": result}


calls = st.builds(lambda name, arguments: {"type": "function_call", "name": name, "arguments": arguments}, texts, texts)
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
    calls,
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
    ("chat", "own"),
    [
        ("messages[1].tool_calls[0].id", "input"),
        ("messages", "input"),
        ("max_tokens", "max_output_tokens"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("tools[0].function.name", "tools[0].name"),
        ("tools[2].function.name", "tools[1].tools[1].name"),
        ("tools[3].function.parameters", "tools[2].format"),
        ("tools", "tools"),
        ("temperature", "temperature"),
    ],
)
def test_the_names_of_a_chats_fields(chat: str, own: str) -> None:
    function = {"type": "function", "name": "f"}
    space = {"type": "namespace", "name": "n", "description": "", "tools": [function, {**function, "name": "g"}]}
    body = {"input": "hi", "tools": [function, space, {"type": "custom", "name": "c"}]}
    request = parse_responses(body)
    assert request.own_name(chat) == own
