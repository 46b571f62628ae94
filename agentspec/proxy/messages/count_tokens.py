"""`POST /v1/messages/count_tokens`: how many tokens the prompt of a Messages request has."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import ClassVar

from starlette.exceptions import HTTPException

from agentspec.backends.base import Forwards, Tokenization, is_forwarding
from agentspec.errors import UpstreamStatusError
from agentspec.protocol.anthropic.requests import MessagesRequest
from agentspec.protocol.requests import parse_chat
from agentspec.proxy.body.amounts import check_characters
from agentspec.proxy.endpoint import Exchange
from agentspec.proxy.messages.endpoint import MessagesEndpoint
from agentspec.proxy.streaming.sending import json_response, respond
from agentspec.types import GenerateRequest


@dataclass(slots=True)
class CountTokensEndpoint(MessagesEndpoint):
    """Counts by the model's own chat template and tokenizer; a strategy's request by those of its base model."""

    generates: ClassVar[bool] = False

    async def _respond(self, exchange: Exchange) -> None:
        backend = exchange.route.backend
        if is_forwarding(backend):
            await self._forward(exchange, backend)
            return
        parsed = await self._run(exchange, lambda: self._local(exchange.fields, backend, exchange.record, count=True))
        base = await self._base_of(exchange.fields["model"])
        if is_forwarding(base.backend):
            await self._send(exchange, _of_server(base.backend, base.upstream_model, parsed))
            return
        if not isinstance(base.backend, Tokenization):
            raise HTTPException(404)
        most = len(parsed.chat["messages"])
        request, _ = await self._run(exchange, lambda: parse_chat(parsed.chat, max_messages=most))
        await self._send(exchange, _of_model(base.backend, request, base.backend.capabilities.context_length))

    async def _translate(self, exchange: Exchange, backend: Forwards) -> None:
        async with exchange.deadline.limit():
            request = await self._chat(exchange, backend, count=True)
        await self._send(exchange, _of_server(backend, exchange.route.upstream_model, request))

    async def _send(self, exchange: Exchange, counting: Awaitable[int]) -> None:
        async with exchange.deadline.limit():
            count = await counting
        await respond(exchange.send, json_response({"input_tokens": count}))


async def _of_model(base: Tokenization, request: GenerateRequest, context_length: int | None) -> int:
    """By a model of this process. Tools that its template cannot take are refused as for an answer."""
    text = await base.render(request.messages or (), request.tools, request.template_arguments)
    check_characters(len(text), context_length, "messages")
    return len(await base.tokenize(text))


async def _of_server(backend: Forwards, model: str, parsed: MessagesRequest) -> int:
    """By the tokenizer endpoints of an upstream, as vLLM has them. Raises 404 for one without."""
    chat = parsed.chat
    arguments = (chat["messages"], chat.get("tools") or (), chat.get("chat_template_kwargs") or {})
    try:
        return len(await backend.tokenizer_of(model).rendered_ids(*arguments))
    except UpstreamStatusError as error:
        if error.status in (404, 405, 501):
            raise HTTPException(404) from None
        raise
