"""Asks an upstream that answers chats only for the answer to a request of another API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from agentspec.backends.base import CHAT
from agentspec.backends.http import Room
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.errors import UpstreamStatusError
from agentspec.protocol.responses import ApiWriter
from agentspec.protocol.wire import encode
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.api import Api, History
from agentspec.proxy.body.budget import RequestBody
from agentspec.proxy.forwarding import with_priority
from agentspec.proxy.request_context import RequestContext
from agentspec.types import Delta

TRANSLATED = {"x-agentspec-translated": "chat.completions"}
TEMPLATED = ("vllm", "sglang")
"""Servers that apply a chat template, and take its arguments, earlier thoughts and a message to be continued."""
_HOSTED = ("api.openai.com", ".openai.azure.com")  # their newer models refuse `max_tokens`


async def chat_request(
    api: Api,
    backend: OpenAIBackend,
    given: Mapping[str, Any],
    body: RequestBody,
    context: RequestContext,
    history: History,
) -> tuple[bytes, ApiWriter]:
    """The body of the chat that the upstream is asked for by the fields `given`, with what the backend sends about the
    client; and what writes the answer in the form of `api`.
    """
    assert api.translate is not None
    templated = await backend.server_kind() in TEMPLATED
    chat, writer = await body.work(api.translate, given, context, history, templated)
    fields = {**chat, "model": context.route.upstream_model}
    if context.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if "max_tokens" in fields and str(backend.settings.url.host).endswith(_HOSTED):
        fields["max_completion_tokens"] = fields.pop("max_tokens")
    asked = with_priority(backend, fields, context)
    fields |= await backend.body_fields(CHAT, context.tenant, context.labels, asked, context.off)
    return await body.work(encode, fields), writer


async def chat_deltas(
    backend: OpenAIBackend, data: bytes, context: RequestContext, answer: RequestAnswer, room: Room
) -> AsyncGenerator[Delta]:
    """The upstream's answer to the chat in `data`. Raises `UpstreamError`."""
    headers = _chat_headers(context.headers)
    sending = backend.forward("POST", CHAT, headers=headers, body=data, tenant=context.tenant)
    try:
        async with sending as response:
            if response.status < 400:
                answer.answered(response.status, response.headers)
            async with aclosing(backend.deltas(response, room)) as deltas:
                async for delta in deltas:
                    yield delta
    except UpstreamStatusError as error:
        answer.answered(error.status, error.headers, error.upstream_body)
        error.for_client = not (answer.has_gateway_key or error.own_key)
        raise


def _chat_headers(given: Mapping[str, str]) -> dict[str, str]:
    headers = dict(given)
    key = headers.pop("x-api-key", None)
    if key is not None:
        headers.setdefault("authorization", f"Bearer {key}")
    return {name: value for name, value in headers.items() if not name.startswith("anthropic-")}
