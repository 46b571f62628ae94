"""`POST /v1/messages`: Anthropic's API for every model of the gateway."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from starlette.exceptions import HTTPException

from agentspec.backends.base import CHAT, MESSAGES, AddsHeaders, Backend, Tokenization
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.errors import InvalidRequestError, UpstreamStatusError
from agentspec.protocol.anthropic.requests import MessagesRequest, parse_messages
from agentspec.protocol.anthropic.responses import MessagesWriter
from agentspec.protocol.requests import parse_chat
from agentspec.protocol.responses import ResponseWriter
from agentspec.protocol.wire import encode
from agentspec.proxy.auth import Caller
from agentspec.proxy.body.amounts import check_characters
from agentspec.proxy.body.upstream_fields import check_head
from agentspec.proxy.endpoint import Exchange, GenerationEndpoint
from agentspec.proxy.errors import anthropic_error_event
from agentspec.proxy.forwarding import Inspector, read_counts, request_headers
from agentspec.proxy.messages.translation import TEMPLATED, TRANSLATED, chat_deltas, chat_fields, chat_headers
from agentspec.proxy.request_record import RequestRecord
from agentspec.proxy.streaming import MESSAGE_EVENTS, Framing, json_response, respond
from agentspec.types import Delta, GenerateRequest


class MessagesInspector(Inspector):
    """Follows a stream of the Messages API, which `message_stop` ends; `message_delta` has the counts so far."""

    telling = re.compile(rb'"(?:message_start|message_delta|message_stop|error)"')

    def __init__(self) -> None:
        super().__init__()
        self._usage: dict[str, Any] = {}

    def failure(self, error: Exception, request_id: str) -> bytes:
        return anthropic_error_event(error, request_id)

    @property
    def counts(self) -> Delta:
        return read_counts({"usage": self._usage})

    def read_event(self, event: Mapping[str, Any]) -> None:
        kind, message = event.get("type"), event.get("message")
        self.done = self.done or kind == "message_stop"
        if kind == "error":
            self.error = self.error or event.get("error") or kind
        usage = event.get("usage") if kind == "message_delta" else isinstance(message, dict) and message.get("usage")
        if isinstance(usage, dict):
            self._usage |= {name: count for name, count in usage.items() if count is not None}


@dataclass(slots=True)
class MessagesEndpoint(GenerationEndpoint):
    """Answers as `GenerationEndpoint` does: a local model's request is read as a chat and answered as messages.

    An upstream that has the route is passed the bytes. Another one is asked for a chat completion.
    """

    framing: ClassVar[Framing] = MESSAGE_EVENTS

    async def _forward(self, exchange: Exchange, backend: OpenAIBackend) -> None:
        check_head(exchange.scope)
        await self._run(exchange, self._check, exchange.fields, backend)
        async with exchange.deadline.limit():
            headers = request_headers(exchange.scope, exchange.record)
            native = await backend.has_route(self.path, headers, exchange.caller.off)
        if native:
            await self._pass_on(exchange, backend, exchange.route.upstream_model, MessagesInspector())
        else:
            await self._translate(exchange, backend)

    async def _translate(self, exchange: Exchange, backend: OpenAIBackend) -> None:
        """Ask the upstream for a chat completion, and answer with what it says."""
        record, model = exchange.record, exchange.route.upstream_model
        async with exchange.deadline.limit():
            request = await self._chat(exchange, backend)
            record.stream, record.response_headers = request.stream, TRANSLATED
            chat = await chat_fields(backend, request.chat, exchange.caller, model, stream=request.stream)
            body = await self._run(exchange, encode, chat)
        del chat
        headers, room = chat_headers(exchange.scope, record), exchange.account.wait_for
        deltas = chat_deltas(backend, body, headers, record, room)
        writer = MessagesWriter(exchange.fields["model"], request.bare())
        exchange.release()
        await self._answer(deltas, writer, exchange)

    async def _chat(self, exchange: Exchange, backend: OpenAIBackend, *, count: bool = False) -> MessagesRequest:
        """The request as a chat for an upstream."""
        templated = await backend.server_kind() in TEMPLATED
        read = partial(parse_messages, exchange.fields, templated=templated, count=count)
        request = await self._run(exchange, read)
        if request.prefilled and not (templated or count):
            message = "the last message must not be the assistant's: this upstream continues no message"
            raise InvalidRequestError(message, param="messages")
        return request

    def _parse(
        self, fields: Mapping[str, Any], caller: Caller, backend: Backend, record: RequestRecord
    ) -> tuple[GenerateRequest, ResponseWriter]:
        parsed = self._local(fields, backend, record)
        request, _ = parse_chat(parsed.chat, max_messages=len(parsed.chat["messages"]))
        request = replace(request, thinking_budget=parsed.thinking_budget)
        if parsed.stream and backend in self.runtime.backends().values():  # no strategy: its prompt is counted first
            request = replace(request, return_prompt=True)
        request, record.stream = caller.sign(request), parsed.stream
        if isinstance(backend, AddsHeaders):
            record.response_headers = backend.response_headers(request)
        return request, MessagesWriter(fields["model"], parsed.bare())

    def _local(
        self, fields: Mapping[str, Any], backend: Backend, record: RequestRecord, *, count: bool = False
    ) -> MessagesRequest:
        """The request as a chat for a model of this process, or for the models that a strategy asks."""
        if CHAT not in backend.capabilities.routes:
            raise InvalidRequestError(f"the model {record.model!r} does not answer {MESSAGES}", param="model")
        self._check_roles(fields, backend)
        return parse_messages(fields, count=count)


@dataclass(slots=True)
class CountTokensEndpoint(MessagesEndpoint):
    """Counts by the model's own chat template and tokenizer; a strategy's request by those of its base model."""

    generates: ClassVar[bool] = False

    async def _respond(self, exchange: Exchange) -> None:
        backend = exchange.route.backend
        if isinstance(backend, OpenAIBackend):
            await self._forward(exchange, backend)
            return
        parsed = await self._run(exchange, lambda: self._local(exchange.fields, backend, exchange.record, count=True))
        base = await self._base_of(exchange.fields["model"])
        if isinstance(base.backend, OpenAIBackend):
            await self._send(exchange, _of_server(base.backend, base.upstream_model, parsed))
            return
        if not isinstance(base.backend, Tokenization):
            raise HTTPException(404)
        most = len(parsed.chat["messages"])
        request, _ = await self._run(exchange, lambda: parse_chat(parsed.chat, max_messages=most))
        await self._send(exchange, _of_model(base.backend, request, base.backend.capabilities.context_length))

    async def _translate(self, exchange: Exchange, backend: OpenAIBackend) -> None:
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


async def _of_server(backend: OpenAIBackend, model: str, parsed: MessagesRequest) -> int:
    """By the tokenizer endpoints of an upstream, as vLLM has them. Raises 404 for one without."""
    chat = parsed.chat
    arguments = (chat["messages"], chat.get("tools") or (), chat.get("chat_template_kwargs") or {})
    try:
        return len(await backend.tokenizer_of(model).rendered_ids(*arguments))
    except UpstreamStatusError as error:
        if error.status in (404, 405, 501):
            raise HTTPException(404) from None
        raise
