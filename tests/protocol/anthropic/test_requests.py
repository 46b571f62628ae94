"""Messages requests as chats; the client's own types are the reference for what a request may hold."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from anthropic import types

from agentspec.errors import InvalidRequestError
from agentspec.protocol.anthropic import requests
from agentspec.protocol.anthropic.requests import INERT, PASSED, _MessagesBody, parse_messages

LOCAL: dict[str, bool] = {}
UPSTREAM = {"images": True, "templated": False}
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
REFUSED = {"container"}  # code that runs on Anthropic's servers


def parsed(limits: dict[str, bool] = LOCAL, **fields: Any) -> Any:
    return parse_messages({"model": "m", "max_tokens": 5, "messages": [USER], **fields}, **limits)


def chat(limits: dict[str, bool] = LOCAL, **fields: Any) -> dict[str, Any]:
    return typing.cast("dict[str, Any]", parsed(limits, **fields).chat)


def names(kind: Any) -> set[str]:
    return set(typing.get_type_hints(kind))


def test_every_field_of_the_clients_types_is_known() -> None:
    known = {*_MessagesBody.model_fields, *INERT, *PASSED, *REFUSED}
    fields = names(types.message_create_params.MessageCreateParamsStreaming) | names(types.MessageCountTokensParams)
    assert fields <= known
    assert names(types.ToolParam) <= {*requests._MessagesTool.model_fields} | requests._MessagesTool.inert
    blocks = {
        "text": types.TextBlockParam,
        "image": types.ImageBlockParam,
        "thinking": types.ThinkingBlockParam,
        "redacted_thinking": types.RedactedThinkingBlockParam,
        "tool_use": types.ToolUseBlockParam,
        "tool_result": types.ToolResultBlockParam,
    }
    for kind, block in blocks.items():
        assert names(block) <= {*requests._BLOCKS[kind].model_fields} | requests._Block.inert
    assert {"type", *names(types.OutputConfigParam)} == {"type", "effort", "format"}


def test_the_smallest_request() -> None:
    assert chat() == {"model": "m", "max_tokens": 5, "messages": [USER]}


def test_a_system_prompt_is_the_first_message() -> None:
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert chat(system=blocks)["messages"][0] == {"role": "system", "content": "a\n\nb"}
    assert chat(system="a")["messages"][0] == {"role": "system", "content": "a"}
    assert chat(system="")["messages"] == chat(system=[])["messages"] == [USER]
    later = [USER, {"role": "system", "content": "now"}, {"role": "ctx", "content": "more"}]
    assert [one["role"] for one in chat(messages=later)["messages"]] == ["user", "system", "user"]


def test_results_of_tools_become_messages_in_order() -> None:
    def result(id: str, **fields: Any) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": id, **fields}

    said = {"type": "text", "text": "And?"}
    blocks = [result("a", content="1"), result("b"), result("c", content=[said], is_error=True), said]
    assert chat(messages=[{"role": "user", "content": blocks}])["messages"] == [
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "tool", "tool_call_id": "c", "content": "Error: And?"},
        {"role": "user", "content": "And?"},
    ]
    seen = chat(UPSTREAM, messages=[{"role": "user", "content": [result("a", content=[said, PNG])]}])["messages"]
    assert seen[0] == {"role": "tool", "tool_call_id": "a", "content": "And?"}
    assert seen[1]["content"][0]["image_url"] == {"url": "data:image/png;base64,aGk="}


def test_an_answer_of_the_model() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "t", "name": "look", "input": {"é": 1}},
    ]
    whole = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "t", "type": "function", "function": {"name": "look", "arguments": '{"é": 1}'}}],
    }
    history = [USER, {"role": "assistant", "content": blocks}]
    assert chat(messages=history)["messages"][1] == whole
    del whole["reasoning_content"]
    assert chat(UPSTREAM, messages=history)["messages"][1] == whole
    alone = chat(messages=[USER, {"role": "assistant", "content": blocks[3:]}])["messages"][1]
    assert alone["content"] is None and not parsed(messages=history).prefilled


def test_a_last_message_of_the_assistant_is_continued() -> None:
    continued = chat(messages=[USER, {"role": "assistant", "content": "So"}])
    assert continued["continue_final_message"] is True and continued["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "look"}, {"tool_choice": {"type": "function", "function": {"name": "look"}}}),
    ],
)
def test_the_choice_of_tools(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    made = chat(tools=[TOOL], tool_choice=choice)
    assert {name: made[name] for name in expected} == expected
    assert ("parallel_tool_calls" in made) == ("parallel_tool_calls" in expected)


def test_a_tool() -> None:
    tool = {**TOOL, "type": "custom", "description": "Looks", "strict": True, "input_examples": [{"a": 1}]}
    [made] = chat(tools=[{**tool, "cache_control": None, "defer_loading": True}])["tools"]
    parameters = {"type": "object", "examples": [{"a": 1}]}
    function = {"name": "look", "description": "Looks", "parameters": parameters, "strict": True}
    assert made == {"type": "function", "function": function}


def test_output_and_thinking() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}}
    assert chat(output_config={"format": form, "effort": "xhigh"})["response_format"] == wanted
    assert chat(output_format=form)["response_format"] == wanted
    assert chat(output_config={"effort": "max"})["reasoning_effort"] == "high"
    assert chat(thinking={"type": "enabled", "budget_tokens": 5})["chat_template_kwargs"] == {"enable_thinking": True}
    own = {"type": "disabled"}
    assert chat(thinking=own, chat_template_kwargs={"a": 1})["chat_template_kwargs"] == {
        "enable_thinking": False,
        "a": 1,
    }
    assert "chat_template_kwargs" not in chat(UPSTREAM, thinking=own)
    assert not parsed(thinking=own).thoughts and parsed(thinking={"type": "adaptive", "display": "omitted"}).omitted


@pytest.mark.parametrize("limits", [LOCAL, UPSTREAM], ids=["local", "upstream"])
@pytest.mark.parametrize("thinking", [{}, {"thinking": {"type": "disabled"}}], ids=["", "thinking"])
@pytest.mark.parametrize("wrong", [[], [["a", "b"]], "", "x", 0, 1, False], ids=str)
def test_arguments_of_a_template_are_an_object(limits: dict[str, bool], thinking: Any, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(limits, chat_template_kwargs=wrong, **thinking)
    assert caught.value.param == "chat_template_kwargs"


def test_what_changes_nothing_is_left_out() -> None:
    inert = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "cache_control": {"type": "ephemeral"},
        "mcp_servers": [],
        "container": None,
    }
    assert chat(**inert) == chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [USER] * 2049}, "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{**USER, "x": 1}]}, "messages[0].x"),
        ({"messages": [{"role": "user", "content": [PNG]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]},
            "messages[0].content[0].text",
        ),
        ({"system": [PNG]}, "system[0].type"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": "9"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"more": 1}}, "output_config.more"),
        ({"output_format": {"type": "text"}}, "output_format.type"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stream": 1}, "stream"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_own_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parsed(**fields)
    assert refused.value.param == param
