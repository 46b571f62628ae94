"""Asks an upstream that answers chats only for the answer to a Messages or a Responses request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.types import Scope

from agentspec.backends.base import CHAT
from agentspec.backends.http import Room
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.errors import UpstreamStatusError
from agentspec.proxy.auth import Caller
from agentspec.proxy.forwarding import request_headers, with_policy
from agentspec.proxy.request_record import RequestRecord
from agentspec.types import Delta

TRANSLATED = {"x-agentspec-translated": "chat.completions"}
TEMPLATED = ("vllm", "sglang")
"""Servers that apply a chat template, and take its arguments, earlier thoughts and a message to be continued."""
_HOSTED = ("api.openai.com", ".openai.azure.com")  # whose newer models refuse `max_tokens`


async def chat_fields(
    backend: OpenAIBackend, chat: Mapping[str, Any], caller: Caller, model: str, *, stream: bool
) -> dict[str, Any]:
    """`chat` for the upstream's chats, with what the backend tells about the caller."""
    fields = {**chat, "model": model}
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if "max_tokens" in fields and str(backend.settings.url.host).endswith(_HOSTED):
        fields["max_completion_tokens"] = fields.pop("max_tokens")
    asked = await with_policy(backend, CHAT, fields, caller)
    return fields | await backend.body_fields(CHAT, caller.tenant, caller.labels, asked, caller.off)


def chat_headers(scope: Scope, record: RequestRecord) -> dict[str, str]:
    """The client's headers for a route of OpenAI's, which takes its key as a bearer's."""
    headers = request_headers(scope, record)
    key = headers.pop("x-api-key", None)
    if key is not None:
        headers.setdefault("authorization", f"Bearer {key}")
    return {name: value for name, value in headers.items() if not name.startswith("anthropic-")}


async def chat_deltas(
    backend: OpenAIBackend,
    body: bytes,
    headers: Mapping[str, str],
    record: RequestRecord,
    room: Room | None = None,
) -> AsyncGenerator[Delta]:
    """The upstream's answer to the chat in `body`; Raises `UpstreamError`."""
    sending = backend.forward("POST", CHAT, headers=headers, body=body, tenant=record.tenant)
    try:
        async with sending as response:
            if response.status < 400:
                record.answer_arrived(response.status, response.headers)
            refused = False
            async with aclosing(backend.deltas(response, room)) as deltas:
                async for delta in deltas:
                    refused = refused or bool(_refusal(delta))
                    yield _readable(delta, refused=refused)
    except UpstreamStatusError as error:
        record.answer_arrived(error.status, error.headers, error.upstream_body)
        error.for_client = not (record.has_gateway_key or error.own_key)
        raise


def _readable(delta: Delta, *, refused: bool) -> Delta:
    """`delta` with a refusal as text, which Messages has no other place for, and as why the answer ended."""
    if not refused:
        return delta
    return replace(delta, text=delta.text + _refusal(delta), finish_reason=delta.finish_reason and "content_filter")


def _refusal(delta: Delta) -> str:
    refusal: Any = delta.extra.get("refusal")
    return refusal if isinstance(refusal, str) else ""
