"""`POST /v1/responses`: answers by local models and strategies, or by upstreams."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from agentspec.backends.base import CHAT, RESPONSES, AddsHeaders, Backend, Forwards, is_forwarding
from agentspec.cache.responses import StoredResponse
from agentspec.errors import InvalidRequestError
from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.openai_responses.items import is_id
from agentspec.protocol.openai_responses.request import ResponsesRequest, parse_responses
from agentspec.protocol.responses import encode
from agentspec.proxy.body.amounts import check_tools
from agentspec.proxy.body.head import check_head
from agentspec.proxy.body.upstream_fields import UpstreamFields
from agentspec.proxy.endpoint import Exchange, GenerationEndpoint
from agentspec.proxy.forwarding.passthrough import added_fields, pass_through, request_headers, with_fields
from agentspec.proxy.forwarding.policy import with_policy
from agentspec.proxy.messages.translation import TEMPLATED, TRANSLATED, chat_deltas, chat_headers, name_bound
from agentspec.proxy.responses.answering import Keep, send_events, send_whole
from agentspec.proxy.responses.keeping import History, Keeper, not_found
from agentspec.proxy.responses.local import LocalAnswer
from agentspec.proxy.responses.upstreams import ResponsesInspector, refuse_what_others_keep, telling_id
from agentspec.proxy.streaming.sending import collected
from agentspec.types import Delta

T = TypeVar("T")
UNENFORCED = "x-agentspec-unenforced"
"""Names the fields for forms of tools' inputs that the model is told, and not held to."""


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
        await self._run(exchange, self._check_roles, exchange.fields, backend)
        request = await self._read(exchange, local=True)
        request, history = await self._continued(exchange, request)
        most = self.settings.max_messages
        answer = LocalAnswer(self.runtime, request, exchange.caller, history.items, most)
        first = await self._run_on(exchange, history, answer.whole)
        added = backend.response_headers(first) if isinstance(backend, AddsHeaders) else {}
        exchange.record.response_headers = {**added, **_unenforced(request)}
        exchange.release()
        await self._send_answer(exchange, request, answer.deltas(first))

    async def _forward(self, exchange: Exchange, backend: Forwards) -> None:
        check_head(exchange.scope)
        await self._run(exchange, self._check, exchange.fields, backend)
        async with exchange.deadline.limit():
            # What one server of a pool keeps the others do not have: there, the gateway keeps answers itself.
            several = exchange.record.attempt is not None
            headers = request_headers(exchange.scope, exchange.record)
            native = not several and await backend.has_route(RESPONSES, headers, exchange.caller.off)
        await (self._pass(exchange, backend) if native else self._translate(exchange, backend))

    async def _pass(self, exchange: Exchange, backend: Forwards) -> None:
        """Pass the bytes of the request to the upstream, and those of its answer back."""
        fields, caller, model = exchange.fields, exchange.caller, exchange.route.upstream_model
        async with exchange.deadline.limit():
            if self.several_tenants:
                refuse_what_others_keep(fields)
                await self._check_ownership(exchange)
            added = await added_fields(backend, RESPONSES, fields, caller, model)
            body = await with_fields(exchange.body, fields, added if caller.store else {**added, "store": False})
        send = exchange.send
        if caller.store and fields.get("store") is not False:
            send = telling_id(send, self._owning(exchange))
        exchange.release()
        scope, account, inspector = exchange.scope, exchange.account, ResponsesInspector()
        await pass_through(scope, send, backend, RESPONSES, body, exchange.deadline, inspector, account=account)

    async def _check_ownership(self, exchange: Exchange) -> None:
        """Raise `ResponseNotFoundError` if the request continues a response that its tenant did not get there."""
        previous = exchange.fields.get("previous_response_id")
        if previous is None:
            return
        if not is_id(previous):
            raise not_found(str(previous), "previous_response_id")
        stored = await self.keeper.get(exchange.record.tenant, previous, "previous_response_id")
        if stored.backend != exchange.route.backend_name:
            raise not_found(previous, "previous_response_id")

    def _owning(self, exchange: Exchange) -> Callable[[str], Awaitable[None]]:
        """Notes whose the response is that the upstream keeps."""
        tenant, session = exchange.record.tenant, exchange.caller.labels.session
        backend = exchange.route.backend_name

        async def found(id: str) -> None:
            if self.keeper.stores:
                await self.keeper.put(StoredResponse(id, tenant, time.time(), session, backend=backend))

        return found

    async def _translate(self, exchange: Exchange, backend: Forwards) -> None:
        """Ask the upstream for a chat completion, and answer with what it says."""
        record = exchange.record
        request = await self._read(exchange, local=False)
        request, history = await self._continued(exchange, request)
        await self._run_on(exchange, history, _check_history, history, backend)
        record.response_headers = TRANSLATED | _unenforced(request)
        async with exchange.deadline.limit():
            templated = await backend.server_kind() in TEMPLATED
            chat = await self._run_on(exchange, history, self._chat, exchange, request, history, templated)
            name_bound(backend, chat)
            caller = exchange.caller
            asked = await with_policy(backend, CHAT, chat, caller)
            chat |= await backend.body_fields(CHAT, caller.tenant, caller.labels, asked, caller.off)
            body = await self._run_on(exchange, history, encode, chat)
        headers, room = chat_headers(exchange.scope, record), exchange.account.wait_for
        deltas = chat_deltas(backend, body, headers, record, room)
        exchange.release()
        await self._send_answer(exchange, request, deltas)

    def _check_answers(self, backend: Backend, exchange: Exchange) -> None:
        if CHAT not in backend.capabilities.routes:
            message = f"the model {exchange.record.model!r} does not answer {RESPONSES}"
            raise InvalidRequestError(message, param="model")

    async def _read(self, exchange: Exchange, *, local: bool) -> ResponsesRequest:
        read = partial(parse_responses, exchange.fields, max_messages=self.settings.max_messages, local=local)
        return await self._run(exchange, read)

    def _chat(self, exchange: Exchange, request: ResponsesRequest, history: History, templated: bool) -> dict[str, Any]:
        """The request as a chat for an upstream. Raises `InvalidRequestError` for the result of a call nobody made."""
        messages = [_sent(message, templated) for message in request.conversation(history.items).messages]
        if len(messages) > self.settings.max_messages:
            message = f"the conversation has more than {self.settings.max_messages} messages (server.max_messages)"
            raise InvalidRequestError(message, param="input")
        check_tools(len(request.tools))
        chat: dict[str, Any] = {**request.chat, "messages": messages, "model": exchange.route.upstream_model}
        if request.stream:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        return chat

    async def _run_on(self, exchange: Exchange, history: History, function: Callable[..., T], *arguments: Any) -> T:
        """The result of work on the body and on `history`, in a thread if both are large."""
        size = len(exchange.body) + history.size
        return await self.budget.run(exchange.record.tenant, size, function, *arguments)

    async def _continued(self, exchange: Exchange, request: ResponsesRequest) -> tuple[ResponsesRequest, History]:
        """The request with the tools of the whole conversation, and the items that it continues."""
        history = await self._history(exchange, request)
        if request.previous is None:
            return request, history
        return await self._run_on(exchange, history, request.continuing, history.items), history

    async def _history(self, exchange: Exchange, request: ResponsesRequest) -> History:
        """The items of the responses that the request continues."""
        if request.previous is None:
            return History([], 0)
        limits = {"most_items": self.settings.max_messages, "most_bytes": int(self.settings.max_body_bytes)}
        async with exchange.deadline.limit():
            history = await self.keeper.history(exchange.record.tenant, request.previous, **limits)
        exchange.account(history.size)
        return history

    async def _send_answer(self, exchange: Exchange, request: ResponsesRequest, deltas: AsyncGenerator[Delta]) -> None:
        """Send the answer that `deltas` are."""
        record, settings = exchange.record, self.settings
        record.stream = request.stream
        stored = request.store and exchange.caller.store and self.keeper.stores
        writer = EventWriter(request, stored=stored, include_speculation=settings.speculation_object)
        keep = self._keeping(exchange, request)
        deltas = collected(deltas, exchange.account)  # a stream ends with the whole answer, too
        if not request.stream:
            deltas = exchange.deadline.within(deltas)
            await send_whole(deltas, writer, record, exchange.send, keep, exchange.account)
            return
        deltas = exchange.deadline.within(deltas)
        await send_events(deltas, writer, record, exchange.send, keep, obfuscate=bool(request.obfuscation))

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
                        begun=time.time() - (time.perf_counter() - exchange.record.started),
                    )
                )

        return keep


def _check_history(history: History, backend: Forwards) -> None:
    """Raise `InvalidRequestError` for what this upstream may not get, though the one before it may have got it."""
    try:
        UpstreamFields(backend.settings).check({"input": history.items}, RESPONSES)
    except InvalidRequestError as error:
        message = f"an earlier response: {error.message}"
        raise InvalidRequestError(message, param="previous_response_id") from None


def _sent(message: dict[str, Any], templated: bool) -> dict[str, Any]:
    """A message for an upstream: only servers that apply a chat template take earlier thoughts, others refuse them."""
    return {name: value for name, value in message.items() if templated or name != "reasoning_content"}


def _unenforced(request: ResponsesRequest) -> dict[str, str]:
    return {UNENFORCED: ", ".join(request.unenforced)} if request.unenforced else {}
