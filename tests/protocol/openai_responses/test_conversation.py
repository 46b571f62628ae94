"""Items of the Responses API as messages of chats: what belongs together, and that nothing is lost on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from agentspec.errors import InvalidRequestError
from agentspec.protocol.messages import parse_message
from agentspec.protocol.openai_responses.request import Conversation, Item, parse_input, parse_responses
from agentspec.protocol.tool_names import ToolNames, key_of

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def messages(value: Any, *, media: bool = False) -> list[dict[str, Any]]:
    made = Conversation()
    made.add_all(parse_input(value, media=media))
    return made.finish()


def test_a_string_is_a_users_message() -> None:
    assert messages("hi") == [{"role": "user", "content": "hi"}]


def test_a_turn_of_the_model_is_one_message() -> None:
    turn = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": None}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "really"},
    ]
    first, one, two, then, last = messages(turn)
    assert (first["content"], first["reasoning_content"]) == ("so", "s")
    assert [call["function"]["name"] for call in first["tool_calls"]] == ["f", "g"]
    assert [(one["tool_call_id"], one["content"]), (two["tool_call_id"], two["content"])] == [("a", "1"), ("b", "2")]
    assert then == {"role": "assistant", "content": "done", "reasoning_content": "t"}
    assert last == {"role": "assistant", "content": "really"}


def test_ids_of_calls_and_items_may_be_long() -> None:
    """As of servers that hide a signature in them, whose answers come back with them."""
    long = "call_" + "x" * 5000
    call = {"type": "function_call", "id": long, "call_id": long, "name": "f", "arguments": "{}"}
    turn, result = messages([call, {"type": "function_call_output", "call_id": long, "output": "1"}])
    assert turn["tool_calls"][0]["id"] == result["tool_call_id"] == long


def test_nothing_stands_between_a_call_and_its_result() -> None:
    turn = [
        {"role": "assistant", "content": "so"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"role": "assistant", "content": " and"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": "2"},
    ]
    first, one, two = messages(turn)
    assert (first["content"], first["reasoning_content"]) == ("so and", "hm")
    assert [call["id"] for call in first["tool_calls"]] == ["a", "b"]
    assert [one["tool_call_id"], two["tool_call_id"]] == ["a", "b"]


@given(texts, texts)
def test_calls_of_custom_tools_are_calls_of_functions(written: str, result: str) -> None:
    head = {"call_id": "a", "name": "edit", "namespace": "disk"}
    value = [
        {"type": "custom_tool_call", **head, "input": written},
        {"type": "custom_tool_call_output", "call_id": "a", "output": result, "name": "edit"},
    ]
    items = parse_input(value, media=False)
    for item in items:
        ITEM.validate_python(item)
    assert parse_input(items, media=False) == items
    [call], output = messages(value)[0]["tool_calls"], messages(value)[1]
    assert call["function"]["name"] == "disk__edit" and json.loads(call["function"]["arguments"]) == {"input": written}
    assert output == {"role": "tool", "tool_call_id": "a", "content": result}


def test_system_messages_at_the_beginning_are_one() -> None:
    made = Conversation()
    made.instruct("be brief")
    made.add_all(parse_input([{"role": "developer", "content": "and kind"}, {"role": "user", "content": "x"},
                              {"role": "system", "content": "now loud"}], media=False))  # fmt: skip
    assert [(one["role"], one["content"]) for one in made.finish()] == [
        ("system", "be brief\n\nand kind"), ("user", "x"), ("system", "now loud"),
    ]  # fmt: skip


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
    parsed = parse_input(given_items, media=False)
    for item in parsed:
        ITEM.validate_python(item)
    assert parse_input(parsed, media=False) == parsed, "the normal form stays as it is"
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


REFUSED: list[tuple[Any, str]] = [
    (5, "input"),
    ([5], "input[0]"),
    ([{}], "input[0].type"),
    ([{"type": ["x"]}], "input[0].type"),
    ([{"type": "web_search_call", "id": "x"}], "input[0].type"),
    ([{"role": "tool", "content": "x"}], "input[0].role"),
    ([{"role": ["user"], "content": "x"}], "input[0].role"),
    ([{"role": "user"}], "input[0].content"),
    ([{"role": "user", "content": [5]}], "input[0].content[0]"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
    ([{"role": "user", "content": "x", "secret": 1}], "input[0].secret"),
    ([{"role": "user", "content": "x", "id": 5}], "input[0].id"),
    ([{"type": "function_call", "call_id": "c", "name": "f"}], "input[0].arguments"),
    ([{"type": "function_call_output", "call_id": "c", "output": 5}], "input[0].output"),
    ([{"type": "function_call_output", "call_id": "c", "output": "x"}], "input[0].call_id"),
    ([{"type": "custom_tool_call", "call_id": "c", "name": "f"}], "input[0].input"),
    ([{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x", "namespace": 5}], "input[0].namespace"),
    ([{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}], "input[0].call_id"),
    ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}], "input[0].encrypted_content"),
    ([{"type": "reasoning", "summary": "x"}], "input[0].summary"),
    ([{"role": "user", "content": "\ud800"}], "input[0].content[0].text"),
    ([{"role": "user", "content": "x"}] * 2049, "input"),
    ([{"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}}], "input[0].type"),
    ([{"type": "additional_tools", "role": "user", "tools": []}], "input[0].role"),
    ([{"type": "additional_tools", "role": "developer", "tools": 5}], "input[0].tools"),
    (
        [{"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "\ud800"}]}],
        "input[0].tools",
    ),
]


@pytest.mark.parametrize(("value", "param"), REFUSED)
def test_what_is_refused(value: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        messages(value)
    assert refused.value.param == param


def test_media_are_for_upstreams() -> None:
    parts = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": "data:x", "detail": "low"},
    ]
    [message] = messages([{"role": "user", "content": parts}], media=True)
    assert message["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
    ]
    image = {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}
    [message] = messages([{"role": role, "content": [parts[1]]} for role in ("system", "developer")], media=True)
    assert message == {"role": "system", "content": [image, image]}
    given = [{"role": "system", "content": "be brief"}, {"role": "developer", "content": parts[:2]}]
    [message] = messages(given, media=True)
    assert message["content"] == [{"type": "text", "text": "be brief"}, {"type": "text", "text": "see"}, image]
    with pytest.raises(InvalidRequestError, match="file_id is not known"):
        messages([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}], media=True)


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
    request = parse_responses(body, local=True)
    assert request.own_name(chat) == own
