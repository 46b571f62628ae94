"""Asks an upstream that answers chats only for the answer to a request of the Responses API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentspec.backends.base import CHAT, Forwards
from agentspec.protocol.openai_responses.items import Item
from agentspec.protocol.openai_responses.request import ResponsesRequest
from agentspec.protocol.responses import encode
from agentspec.proxy.admission.auth import Caller
from agentspec.proxy.messages.translation import TEMPLATED


async def chat_body(
    backend: Forwards, request: ResponsesRequest, history: Sequence[Item], caller: Caller, model: str
) -> bytes:
    """The body for the upstream's chats, with what the backend tells about the caller.

    Only servers that apply a chat template are sent earlier thoughts: others refuse the field.
    """
    templated = await backend.server_kind() in TEMPLATED
    messages = [_sent(message, templated) for message in request.conversation(history).messages]
    chat: dict[str, Any] = {**request.chat, "messages": messages, "model": model}
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return encode(chat | await backend.body_fields(CHAT, caller.tenant, caller.labels, chat))


def _sent(message: dict[str, Any], templated: bool) -> dict[str, Any]:
    return {name: value for name, value in message.items() if templated or name != "reasoning_content"}
