"""The client's tools as functions of a chat, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.protocol.openai_responses.request import parse_responses
from agentspec.protocol.openai_responses.tools import (
    ClientTool,
    allowed_tools,
    chat_tools,
    client_tools,
    input_of,
)
from agentspec.protocol.requests import MAX_TOOLS
from agentspec.protocol.tool_names import ToolNames

FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
CUSTOM = {"type": "custom", "name": "write", "description": "Writes."}
SPACE = {"type": "namespace", "name": "disk", "description": "The disk.", "tools": [FUNCTION, CUSTOM]}


def test_functions_of_a_chat() -> None:
    tools = client_tools([FUNCTION, CUSTOM, SPACE])
    names = ToolNames.of(tool.key for tool in tools)
    functions = [tool["function"] for tool in chat_tools(tools, names)]
    assert [one["name"] for one in functions] == ["look", "write", "disk__look", "disk__write"]
    assert functions[0] == {"name": "look", "parameters": {"type": "object"}, "strict": False}
    assert functions[2]["description"] == "The disk." and functions[3]["description"] == "Writes."
    assert functions[1]["parameters"]["required"] == ["input"] and all(tool.enforced for tool in tools)
    assert [tool.param for tool in tools][2:] == ["tools[2].tools[0]", "tools[2].tools[1]"]


@pytest.mark.parametrize(
    ("choice", "chosen", "left"),
    [
        ("auto", "auto", 5),
        ({"type": "custom", "name": "write"}, "tools[1]", 5),
        ({"type": "function", "name": "look"}, "tools[0]", 5),
        ({"type": "function", "name": "look", "namespace": "functions"}, "tools[0]", 5),
        ({"type": "function", "name": "look", "namespace": "disk"}, "tools[2].tools[0]", 5),
        ({"type": "function", "name": "only"}, "tools[2].tools[2]", 5),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "write"}]}, "required", 1),
    ],
)
def test_choices(choice: Any, chosen: str, left: int) -> None:
    space = {**SPACE, "tools": [FUNCTION, CUSTOM, {**FUNCTION, "name": "only"}]}
    found, tools = allowed_tools(choice, client_tools([FUNCTION, CUSTOM, space]))
    assert (found.param if isinstance(found, ClientTool) else found) == chosen and len(tools) == left


def test_a_choice_that_several_namespaces_have_must_say_which() -> None:
    spaces = [{**SPACE, "name": name} for name in ("disk", "tape")]
    with pytest.raises(InvalidRequestError, match="several namespaces"):
        allowed_tools({"type": "function", "name": "look"}, client_tools(spaces))


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "write"},
        {"type": "custom", "name": "write", "namespace": "other"},
        {"type": "custom"},
        {"type": "allowed_tools", "tools": [{"type": "web_search"}]},
        {"type": "web_search"},
        "any",
    ],
)
def test_choices_that_are_refused(choice: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        allowed_tools(choice, client_tools([FUNCTION, CUSTOM, SPACE]))
    assert refused.value.param == "tool_choice"


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (5, "tools[0]"),
        ({"type": "web_search"}, "tools[0].type"),
        ({"type": "custom"}, "tools[0].name"),
        ({**CUSTOM, "defer_loading": True}, "tools[0].defer_loading"),
        ({"type": "tool_search", "execution": "client"}, "tools[0].type"),
        ({**SPACE, "tools": [FUNCTION, FUNCTION]}, "tools[0].tools[1].name"),
        ({**FUNCTION, "name": ""}, "tools[0].name"),
        ({**FUNCTION, "output_schema": {"type": "object"}}, "tools[0].output_schema"),
        ({**CUSTOM, "format": {"type": "json"}}, "tools[0].format.type"),
        ({**CUSTOM, "format": {**GRAMMAR, "syntax": "ebnf"}}, "tools[0].format.syntax"),
        ({**CUSTOM, "format": {"type": "grammar"}}, "tools[0].format.definition"),
        ({**CUSTOM, "format": {**GRAMMAR, "flags": "i"}}, "tools[0].format.flags"),
        ({**SPACE, "tools": [SPACE]}, "tools[0].tools[0].type"),
        ({**SPACE, "tools": "all"}, "tools[0].tools"),
        ({**SPACE, "tools": [{**FUNCTION, "name": 5}]}, "tools[0].tools[0].name"),
        ({**SPACE, "tools": ["look"]}, "tools[0].tools[0]"),
        ({"type": "namespace", "tools": []}, "tools[0].name"),
    ],
)
def test_what_is_refused(tool: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        client_tools([tool])
    assert refused.value.param == param


def test_tools_of_namespaces_are_counted() -> None:
    each = [{**FUNCTION, "name": f"look{number}"} for number in range(MAX_TOOLS)]
    full = [{**SPACE, "tools": each[:100]}, {**SPACE, "tools": each[100:]}]
    assert len(client_tools(full)) == MAX_TOOLS
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_TOOLS}") as refused:
        client_tools([*full, FUNCTION])
    assert refused.value.param == "tools"


@pytest.mark.parametrize(("format", "enforced"), [(GRAMMAR, False), ({"type": "text"}, True), (None, True)])
def test_a_grammar_is_told_and_not_enforced(format: Any, enforced: bool) -> None:
    request = parse_responses({"model": "m", "input": "hi", "tools": [{**CUSTOM, "format": format}]}, local=True)
    assert request.unenforced == ([] if enforced else ["tools[0].format"])
    function = request.chat["tools"][0]["function"]
    assert (GRAMMAR["definition"] in function["parameters"]["properties"]["input"]["description"]) is not enforced
    assert "strict" not in function


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [], "tool_choice": "auto"}])
def test_a_chat_without_tools_says_nothing_about_their_calls(fields: dict[str, Any]) -> None:
    body = {"model": "m", "input": "hi", "parallel_tool_calls": False, **fields}
    request = parse_responses(body, local=False)
    assert request.chat == {"model": "m"} and request.fields["parallel_tool_calls"] is False


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
def test_models_that_keep_to_no_form(written: str, text: str) -> None:
    assert input_of(written) == text
