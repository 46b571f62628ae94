"""Requests of the Responses API as chats for an upstream that answers only those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentspec.protocol.openai_responses.items import Item
from agentspec.protocol.openai_responses.request import ResponsesRequest


def chat_request(request: ResponsesRequest, history: Sequence[Item], model: str, *, templated: bool) -> dict[str, Any]:
    """The chat that asks `model` for the answer to `request`, which continues `history`.

    Only servers that apply a chat template (`templated`) are sent earlier thoughts: others refuse the field. Raises
    `InvalidRequestError` for the result of a call that nobody made.
    """
    messages = [_sent(message, templated) for message in request.conversation(history).messages]
    chat: dict[str, Any] = {**request.chat, "messages": messages, "model": model}
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def _sent(message: dict[str, Any], templated: bool) -> dict[str, Any]:
    return {name: value for name, value in message.items() if templated or name != "reasoning_content"}
