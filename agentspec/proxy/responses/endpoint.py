"""`POST /v1/responses`: answers by local models and strategies, or by upstreams."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from agentspec.backends.base import CHAT, AddsHeaders, Backend, is_forwarding
from agentspec.cache.responses import StoredResponse
from agentspec.errors import InvalidRequestError
from agentspec.protocol.openai_responses.counts import count_reasoning
from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.openai_responses.items import Item
from agentspec.protocol.openai_responses.request import ResponsesRequest, parse_responses
from agentspec.proxy.endpoint import Exchange, GenerationEndpoint
from agentspec.proxy.responses.answering import Keep, send_events, send_whole
from agentspec.proxy.responses.keeping import Keeper
from agentspec.proxy.responses.local import LocalAnswer
from agentspec.proxy.streaming.pacing import paced
from agentspec.types import Delta

RESPONSES = "/responses"


@dataclass(slots=True)
class ResponsesEndpoint(GenerationEndpoint):
    """Answers by the rules of chats; see `protocol/openai_responses/` for how requests and answers correspond."""

    keeper: Keeper = field(init=False)

    def __post_init__(self) -> None:
        self.keeper = Keeper(self.runtime)

    async def _respond(self, exchange: Exchange) -> None:
        backend = exchange.route.backend
        if is_forwarding(backend):
            await self._forward(exchange, backend)
            return
        self._check_answers(backend, exchange)
        request = await self._run(exchange, self._read, exchange.fields, True)
        history = await self._history(exchange, request)
        answer = LocalAnswer(self.runtime, request, exchange.caller, history, self.settings.max_messages)
        first = await self._run(exchange, answer.whole)
        if isinstance(backend, AddsHeaders):
            exchange.record.response_headers = backend.response_headers(first)
        exchange.release()
        await self._send_answer(exchange, request, answer.deltas(first))

    def _check_answers(self, backend: Backend, exchange: Exchange) -> None:
        if CHAT not in backend.capabilities.routes:
            message = f"the model {exchange.record.model!r} does not answer {RESPONSES}"
            raise InvalidRequestError(message, param="model")

    def _read(self, fields: Any, local: bool) -> ResponsesRequest:
        return parse_responses(fields, max_messages=self.settings.max_messages, local=local)

    async def _history(self, exchange: Exchange, request: ResponsesRequest) -> list[Item]:
        """The items of the responses that the request continues."""
        if request.previous is None:
            return []
        limits = {"most_items": self.settings.max_messages, "most_bytes": int(self.settings.max_body_bytes)}
        async with exchange.deadline.limit():
            history = await self.keeper.history(exchange.record.tenant, request.previous, **limits)
        exchange.account(history.size)
        return history.items

    async def _send_answer(self, exchange: Exchange, request: ResponsesRequest, deltas: AsyncGenerator[Delta]) -> None:
        """Send the answer that `deltas` are."""
        record, settings = exchange.record, self.settings
        record.stream = request.stream
        stored = request.store and exchange.caller.store and self.keeper.stores
        writer = EventWriter(request, stored=stored, include_speculation=settings.speculation_object)
        keep = self._keeping(exchange, request)
        deltas = count_reasoning(deltas)
        if not request.stream:
            await send_whole(exchange.deadline.within(deltas), writer, record, exchange.send, keep)
            return
        if settings.stream_pacing:
            deltas = paced(deltas, settings.stream_pacing, settings.stream_pacing_characters)
        obfuscate = bool(settings.stream_pacing) if request.obfuscation is None else request.obfuscation
        deltas = exchange.deadline.within(deltas)
        await send_events(deltas, writer, record, exchange.send, keep, obfuscate=obfuscate)

    def _keeping(self, exchange: Exchange, request: ResponsesRequest) -> Keep:
        tenant, session = exchange.record.tenant, exchange.caller.labels.session

        async def keep(writer: EventWriter) -> None:
            """Store the answer, or have it say that it is not stored."""
            if writer.stored:
                response = writer.response
                writer.stored = await self.keeper.put(
                    StoredResponse(
                        id=writer.id,
                        tenant=tenant,
                        created_at=time.time(),
                        session=session,
                        previous=request.previous,
                        response=response,
                        items=request.items,
                    )
                )

        return keep
