"""Messages and tools through templates that know tools, and through those that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.backends.torch.text.tokenizer import render, template_of, tool_format
from agentspec.backends.torch.text.tool_parser import HERMES, MISTRAL
from agentspec.errors import InvalidRequestError
from agentspec.types import GenerateRequest

TOOL = {"type": "function", "function": {"name": "f", "description": "does f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
]
WITH_TOOLS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}:"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a[0] }}{% endfor %};"
    "{% endfor %}"
    "{% if thinking is defined %}{{ thinking }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
)


def rendered(tokenizer: Any, messages: Any = TALK, start: bool = True, **fields: Any) -> str:
    return render(tokenizer, GenerateRequest("m", messages=messages, **fields), start=start, continue_final=False)


def test_a_template_that_knows_tools_gets_them_and_arguments_as_objects(tokenizer_of: Any) -> None:
    tokenizer = tokenizer_of(WITH_TOOLS)
    said = rendered(tokenizer, tools=(TOOL,), template_arguments={"thinking": "no"})
    assert said == "[f]user:hi;assistant:<tool_call>1;tool:done;no>"
    assert rendered(tokenizer, start=False) == "user:hi;assistant:<tool_call>1;tool:done;"


def test_one_that_does_not_has_them_described(byte_tokens: Any) -> None:
    said = rendered(byte_tokens, tools=(TOOL,))
    system, user, calls, result, end = said.split("<|")[1:]
    assert json.dumps(TOOL["function"]) in system and "<tool_call>" in system
    assert user == "user|>hi" and calls.endswith('<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>')
    assert result == "user|><tool_response>\ndone\n</tool_response>" and end == "assistant|>"
    told = rendered(byte_tokens, [{"role": "system", "content": "be kind"}, *TALK], tools=(TOOL,))
    assert told.startswith("<|user|>be kind\n\n") and told.count("<tools>") == 1
    assert "<tools>" not in rendered(byte_tokens)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"function": {"name": "f"}},
        {"function": {"name": "f", "arguments": ["{}"]}},
        {"function": {"name": "f", "arguments": "[" * 100_000}},
        {"function": {"name": 3, "arguments": "{}"}},
    ],
)
def test_calls_that_are_none_are_refused(byte_tokens: Any, call: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        rendered(byte_tokens, [{"role": "assistant", "tool_calls": [call]}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("arguments", ['{"a": ', "[]", "", "5"])
def test_a_call_that_a_model_broke_off_ends_no_conversation(byte_tokens: Any, arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    said = rendered(byte_tokens, [{"role": "assistant", "tool_calls": [call]}])
    assert '{"name": "f", "arguments": {}}' in said


def test_the_format_follows_the_template(tokenizer_of: Any, byte_tokens: Any) -> None:
    assert tool_format(byte_tokens) is HERMES
    tokenizer = tokenizer_of(WITH_TOOLS)
    assert tool_format(tokenizer) is HERMES
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "[TOOL_CALLS]{{ tools }}"}
    assert tool_format(tokenizer) is MISTRAL and template_of(tokenizer) == "{{ messages }}"
    tokenizer.chat_template = "{{ tools }} in a format of its own"
    with pytest.raises(InvalidRequestError, match="not known here") as caught:
        tool_format(tokenizer)
    assert caught.value.param == "tools"


def test_chats_and_prompts_have_a_largest_size(tokenizer_of: Any) -> None:
    said = [{"role": "user", "content": "x" * 1000}]
    assert len(rendered(tokenizer_of("{{ messages[0].content * 10000 }}"), said)) == 10_000_000
    with pytest.raises(InvalidRequestError, match="the prompt is longer than 10,000,000 characters"):
        rendered(tokenizer_of("{{ messages[0].content * 10000 }}x"), said)
    with pytest.raises(InvalidRequestError, match="messages holds more than 10,000 messages"):
        rendered(tokenizer_of("{{ messages|length }}"), [{"role": "user", "content": ""}] * 10_001)


def test_a_message_that_the_template_does_not_show_cannot_be_continued(tokenizer_of: Any) -> None:
    request = GenerateRequest("m", messages=[{"role": "assistant", "content": "so"}])
    with pytest.raises(InvalidRequestError, match="refuses these messages") as caught:
        render(tokenizer_of("{{ messages[0].role }}"), request, start=False, continue_final=True)
    assert caught.value.param == "messages"
