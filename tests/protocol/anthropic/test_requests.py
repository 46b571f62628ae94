"""Messages requests as chats; the client's own types are the reference for what a request may hold."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from anthropic import types

from agentspec.errors import InvalidRequestError
from agentspec.protocol.anthropic.requests import (
    INERT,
    PASSED,
    SAID,
    WRITTEN,
    MessagesBody,
    MessagesTool,
    parse_messages,
)

LOCAL: dict[str, bool] = {}
UPSTREAM = {"templated": False}
USER = {"role": "user", "content": "hi"}
REFUSED = {"container"}  # code that runs on Anthropic's servers


def parsed(limits: dict[str, bool] = LOCAL, **fields: Any) -> Any:
    return parse_messages({"model": "m", "max_tokens": 5, "messages": [USER], **fields}, **limits)


def chat(limits: dict[str, bool] = LOCAL, **fields: Any) -> dict[str, Any]:
    return typing.cast("dict[str, Any]", parsed(limits, **fields).chat)


def names(kind: Any) -> set[str]:
    return set(typing.get_type_hints(kind))


def test_every_field_of_the_clients_types_is_known() -> None:
    known = {*MessagesBody.model_fields, *INERT, *PASSED, *REFUSED}
    fields = names(types.message_create_params.MessageCreateParamsStreaming) | names(types.MessageCountTokensParams)
    assert fields <= known
    assert names(types.ToolParam) <= {*MessagesTool.model_fields} | MessagesTool.inert
    blocks = {
        "text": types.TextBlockParam,
        "image": types.ImageBlockParam,
        "thinking": types.ThinkingBlockParam,
        "redacted_thinking": types.RedactedThinkingBlockParam,
        "tool_use": types.ToolUseBlockParam,
        "tool_result": types.ToolResultBlockParam,
    }
    for kind, block in blocks.items():
        model = (SAID | WRITTEN)[kind]
        assert names(block) <= {*model.model_fields} | model.inert
    assert {"type", *names(types.OutputConfigParam)} == {"type", "effort", "format"}


@pytest.mark.parametrize("limits", [LOCAL, UPSTREAM], ids=["local", "upstream"])
@pytest.mark.parametrize("thinking", [{}, {"thinking": {"type": "disabled"}}], ids=["", "thinking"])
@pytest.mark.parametrize("wrong", [[], [["a", "b"]], "", "x", 0, 1, False], ids=str)
def test_arguments_of_a_template_are_an_object(limits: dict[str, bool], thinking: Any, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(limits, chat_template_kwargs=wrong, **thinking)
    assert caught.value.param == "chat_template_kwargs"
