"""The client's tools as functions of a chat, and what is refused."""

from __future__ import annotations

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.protocol.openai_responses.tools import (
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


def test_tools_of_namespaces_are_counted() -> None:
    each = [{**FUNCTION, "name": f"look{number}"} for number in range(MAX_TOOLS)]
    full = [{**SPACE, "tools": each[:100]}, {**SPACE, "tools": each[100:]}]
    assert len(client_tools(full)) == MAX_TOOLS
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_TOOLS}") as refused:
        client_tools([*full, FUNCTION])
    assert refused.value.param == "tools"


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
