"""`POST /v1/messages`: Anthropic's API for every model of the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from agentspec.backends.base import CHAT, MESSAGES, AddsHeaders, Backend, Forwards
from agentspec.errors import InvalidRequestError
from agentspec.protocol.anthropic.requests import MessagesLimits, MessagesRequest, parse_messages
from agentspec.protocol.anthropic.responses import MessagesWriter
from agentspec.protocol.requests import parse_chat
from agentspec.protocol.responses import ResponseWriter, encode
from agentspec.proxy.admission.auth import Caller
from agentspec.proxy.body.head import check_head
from agentspec.proxy.endpoint import Exchange, GenerationEndpoint
from agentspec.proxy.forwarding.inspection import MessagesInspector
from agentspec.proxy.forwarding.passthrough import pass_through, request_headers, upstream_body
from agentspec.proxy.messages.translation import TEMPLATED, TRANSLATED, chat_deltas, chat_fields, chat_headers
from agentspec.proxy.request_record import RequestRecord
from agentspec.proxy.streaming.framing import MESSAGE_EVENTS, Framing
from agentspec.types import GenerateRequest


@dataclass(slots=True)
class MessagesEndpoint(GenerationEndpoint):
    """Answers as `GenerationEndpoint` does: a local model's request is read as a chat and answered as messages.

    An upstream that has the route is passed the bytes. Another one is asked for a chat completion.
    """

    framing: ClassVar[Framing] = MESSAGE_EVENTS

    async def _forward(self, exchange: Exchange, backend: Forwards) -> None:
        check_head(exchange.scope)
        await self._run(exchange, self._check, exchange.fields, backend)
        async with exchange.deadline.limit():
            headers = request_headers(exchange.scope, exchange.record)
            native = await backend.has_route(self.path, headers, exchange.caller.off)
        await (self._pass(exchange, backend) if native else self._translate(exchange, backend))

    async def _pass(self, exchange: Exchange, backend: Forwards) -> None:
        """Pass the bytes of the request to the upstream, and those of its answer back."""
        model = exchange.route.upstream_model
        async with exchange.deadline.limit():
            body = await upstream_body(backend, self.path, exchange.body, exchange.fields, exchange.caller, model)
        exchange.release()
        scope, send, account, inspector = exchange.scope, exchange.send, exchange.account, MessagesInspector()
        await pass_through(scope, send, backend, self.path, body, exchange.deadline, inspector, account=account)

    async def _translate(self, exchange: Exchange, backend: Forwards) -> None:
        """Ask the upstream for a chat completion, and answer with what it says."""
        record, model = exchange.record, exchange.route.upstream_model
        async with exchange.deadline.limit():
            request = await self._chat(exchange, backend)
            record.stream, record.response_headers = request.stream, TRANSLATED
            chat = await chat_fields(backend, request, exchange.caller, model)
            body = await self._run(exchange, encode, chat)
        del chat
        headers, room = chat_headers(exchange.scope, record), exchange.account.wait_for
        deltas = chat_deltas(backend, body, headers, record, room)
        writer = MessagesWriter(exchange.fields["model"], request.bare(), self.settings.speculation_object)
        exchange.release()
        await self._answer(deltas, writer, exchange)

    async def _chat(self, exchange: Exchange, backend: Forwards, *, count: bool = False) -> MessagesRequest:
        """The request as a chat for an upstream."""
        templated = await backend.server_kind() in TEMPLATED
        limits = MessagesLimits(self.settings.max_messages, images=True, templated=templated)
        return await self._run(exchange, lambda: parse_messages(exchange.fields, limits, count=count))

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
        return request, MessagesWriter(fields["model"], parsed.bare(), self.settings.speculation_object)

    def _local(
        self, fields: Mapping[str, Any], backend: Backend, record: RequestRecord, *, count: bool = False
    ) -> MessagesRequest:
        """The request as a chat for a model of this process, or for the models that a strategy asks."""
        if CHAT not in backend.capabilities.routes:
            raise InvalidRequestError(f"the model {record.model!r} does not answer {MESSAGES}", param="model")
        self._check_roles(fields, backend)
        return parse_messages(fields, MessagesLimits(self.settings.max_messages), count=count)
