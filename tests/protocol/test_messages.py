from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.protocol.messages import parse_message, parse_prediction, parse_tool_choice, parse_tools

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "developer", "content": PARTS}, {"role": "system", "content": "ab"}),
        ({"role": "user", "content": "x", "name": 1, "refusal": None}, {"role": "user", "content": "x"}),
        (
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}], "reasoning": "hm"},
            {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "hm", "content": ""},
        ),
        ({"role": "assistant", "content": "c", "tool_calls": []}, {"role": "assistant", "content": "c"}),
        (
            {"role": "tool", "content": "y", "tool_call_id": "1", "name": "f"},
            {"role": "tool", "tool_call_id": "1", "name": "f", "content": "y"},
        ),
    ],
)
def test_messages_as_templates_read_them(message: dict[str, Any], read: dict[str, Any]) -> None:
    found = parse_message(message, "messages[0]")
    assert found == read and list(found) == list(read)


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        ("hi", "messages[0] must be an object, not a string"),
        ({}, "messages[0].role must be a string, not null"),
        (
            {"role": "wizard"},
            "messages[0].role is not supported by this model; known: system, developer, user, assistant, tool",
        ),
        (
            {"role": "user", "content": 5},
            "messages[0].content must be a string or an array of text parts, not a number",
        ),
        ({"role": "user", "content": [5]}, "messages[0].content[0] must be an object, not a number"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages[0].content[0]: this model reads parts of type 'text' only",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text must be a string, not null"),
        (
            {"role": "user", "content": "\ud800"},
            "messages[0].content holds half a surrogate pair, which is not text",
        ),
        ({"role": "user", "content": "a", "é": 1}, "messages[0].? is not known or not supported by this model"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]},
            "messages[0].tool_calls[0].function.arguments must be a string, not an object",
        ),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id must be a string, not null"),
    ],
)
def test_a_refusal_names_the_place(message: Any, refusal: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_message(message, "messages[0]")
    assert caught.value.message == refusal and refusal.startswith(caught.value.param or "?")


def test_tools_stay_as_they_were_described() -> None:
    function = {"strict": True, "name": "f", "parameters": {"b": None, "a": 1}, "description": None}
    [tool] = parse_tools([{"function": function, "more": 1}])
    assert tool == {"type": "function", "function": {key: function[key] for key in ("strict", "name", "parameters")}}
    assert list(tool["function"]) == ["strict", "name", "parameters"]


def test_the_choice_of_a_tool() -> None:
    assert [parse_tool_choice(choice) for choice in ("none", "required")] == ["none", "required"]
    assert parse_tool_choice({"type": "function", "function": {"name": "f"}}) == "f"
    with pytest.raises(InvalidRequestError, match="none, auto, required or an object that names a tool"):
        parse_tool_choice("any")


def test_a_prediction_is_text_or_parts() -> None:
    assert parse_prediction({"type": "content", "content": PARTS}) == "ab"
    with pytest.raises(InvalidRequestError, match="fields other than type and content"):
        parse_prediction({"type": "content", "content": "x", "more": 1})
