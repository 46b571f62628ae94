"""`POST /v1/responses`: answers by local models and strategies, or by upstreams."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentspec.backends.base import CHAT, RESPONSES, AddsHeaders
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.cache.stored import StoredResponse
from agentspec.errors import InvalidRequestError, OverloadedError
from agentspec.protocol.errors import without_account
from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.openai_responses.items import is_id
from agentspec.protocol.openai_responses.request import ResponsesRequest, parse_responses
from agentspec.protocol.requests import MAX_MESSAGES, parse_chat
from agentspec.protocol.responses import obfuscated
from agentspec.protocol.wire import encode, named_event
from agentspec.proxy.auth import Caller
from agentspec.proxy.body.kept_names import refuse_what_others_keep
from agentspec.proxy.body.upstream_fields import UpstreamFields, check_head
from agentspec.proxy.endpoint import Exchange, GenerationEndpoint
from agentspec.proxy.errors import error_response
from agentspec.proxy.forwarding import added_fields, pass_through, request_headers, with_fields
from agentspec.proxy.messages.translation import TEMPLATED, TRANSLATED, chat_deltas, chat_fields, chat_headers
from agentspec.proxy.responses.stored import History, Keeper, not_found
from agentspec.proxy.responses.upstreams import ResponsesInspector, telling_id
from agentspec.proxy.streaming import EVENT_STREAM, json_response, note, record_failure, respond, send_piece
from agentspec.types import Delta, GenerateRequest

T = TypeVar("T")
UNENFORCED = "x-agentspec-unenforced"
"""Names the fields for forms of tools' inputs that the model is told, and not held to."""


@dataclass(slots=True)
class ResponsesEndpoint(GenerationEndpoint):
    """Answers by the rules of chats; see `protocol/openai_responses/` for how requests and answers correspond."""

    keeper: Keeper = field(init=False)

    def __post_init__(self) -> None:
        GenerationEndpoint.__post_init__(self)
        self.keeper = Keeper(self.runtime, self.settings)

    async def _respond(self, exchange: Exchange) -> None:
        backend = exchange.route.backend
        if isinstance(backend, OpenAIBackend):
            await self._forward(exchange, backend)
            return
        if CHAT not in backend.capabilities.routes:
            message = f"the model {exchange.record.model!r} does not answer {RESPONSES}"
            raise InvalidRequestError(message, param="model")
        await self._run(exchange, self._check_roles, exchange.fields, backend)
        request, history = await self._read(exchange)
        first = await self._run_on(exchange, history, self._local, exchange.caller, request, history)
        added = backend.response_headers(first) if isinstance(backend, AddsHeaders) else {}
        exchange.record.response_headers = {**added, **_unenforced(request)}
        exchange.release()
        with _own_names(request):
            await self._send_answer(exchange, request, self.runtime.answer(first, exchange.route))

    def _local(self, caller: Caller, request: ResponsesRequest, history: History) -> GenerateRequest:
        """The request for a backend, with the whole conversation."""
        chat = {**request.chat, "messages": request.messages(history.items)}
        with _own_names(request):
            parsed, _ = parse_chat(chat)
        return caller.sign(parsed)

    async def _forward(self, exchange: Exchange, backend: OpenAIBackend) -> None:
        check_head(exchange.scope)
        await self._run(exchange, self._check, exchange.fields, backend)
        async with exchange.deadline.limit():
            # What one server of a pool keeps the others do not have: there, the gateway keeps answers itself.
            several = exchange.record.attempt is not None
            headers = request_headers(exchange.scope, exchange.record)
            native = not several and await backend.has_route(RESPONSES, headers, exchange.caller.off)
        await (self._pass_response(exchange, backend) if native else self._translate(exchange, backend))

    async def _pass_response(self, exchange: Exchange, backend: OpenAIBackend) -> None:
        """Pass the bytes of the request to the upstream, and those of its answer back."""
        fields, caller, model = exchange.fields, exchange.caller, exchange.route.upstream_model
        async with exchange.deadline.limit():
            if self.several_tenants:
                refuse_what_others_keep(fields)
                await self._check_ownership(exchange)
            added = await added_fields(backend, RESPONSES, fields, caller, model)
            body = await with_fields(exchange.body, fields, added if caller.store else {**added, "store": False})
        if caller.store and fields.get("store") is not False:
            exchange.send = telling_id(exchange.send, self._owning(exchange))
        exchange.release()
        await pass_through(exchange, backend, RESPONSES, body, ResponsesInspector())

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

    async def _translate(self, exchange: Exchange, backend: OpenAIBackend) -> None:
        """Ask the upstream for a chat completion, and answer with what it says."""
        record = exchange.record
        request, history = await self._read(exchange)
        await self._run_on(exchange, history, _check_history, history, backend)
        record.response_headers = TRANSLATED | _unenforced(request)
        async with exchange.deadline.limit():
            templated = await backend.server_kind() in TEMPLATED
            chat = await self._run_on(exchange, history, self._chat, request, history, templated)
            model = exchange.route.upstream_model
            chat = await chat_fields(backend, chat, exchange.caller, model, stream=request.stream)
            body = await self._run_on(exchange, history, encode, chat)
        headers, room = chat_headers(exchange.scope, record), exchange.account.wait_for
        deltas = chat_deltas(backend, body, headers, record, room)
        exchange.release()
        await self._send_answer(exchange, request, deltas)

    async def _read(self, exchange: Exchange) -> tuple[ResponsesRequest, History]:
        """The request, with the tools of the whole conversation, and the items that it continues."""
        request = await self._run(exchange, parse_responses, exchange.fields)
        if request.previous is None:
            return request, History([], 0)
        async with exchange.deadline.limit():
            history = await self.keeper.history(exchange.record.tenant, request.previous)
        exchange.account(history.size)
        return await self._run_on(exchange, history, request.continuing, history.items), history

    def _chat(self, request: ResponsesRequest, history: History, templated: bool) -> dict[str, Any]:
        """The request as a chat for an upstream. Raises `InvalidRequestError` for the result of a call nobody made."""
        messages = [_sent(message, templated) for message in request.messages(history.items)]
        if len(messages) > MAX_MESSAGES:
            message = f"the conversation has more than {MAX_MESSAGES} messages"
            raise InvalidRequestError(message, param="input")
        return {**request.chat, "messages": messages}

    async def _run_on(self, exchange: Exchange, history: History, function: Callable[..., T], *arguments: Any) -> T:
        """The result of work on the body and on `history`, in a thread if both are large."""
        size = len(exchange.body) + history.size
        return await self.budget.run(exchange.record.tenant, size, function, *arguments)

    async def _send_answer(self, exchange: Exchange, request: ResponsesRequest, deltas: AsyncGenerator[Delta]) -> None:
        """Send the answer that `deltas` are."""
        record = exchange.record
        record.stream = request.stream
        stored = request.store and exchange.caller.store and self.keeper.stores
        writer = EventWriter(request, stored=stored)
        keep = self._keeping(exchange, request)
        if request.stream:
            await send_events(deltas, writer, exchange, keep, obfuscate=bool(request.obfuscation))
        else:
            await send_whole(deltas, writer, exchange, keep)

    def _keeping(self, exchange: Exchange, request: ResponsesRequest) -> Keep:
        tenant, session = exchange.record.tenant, exchange.caller.labels.session

        async def keep(writer: EventWriter) -> None:
            """Store the answer, or have it say that it is not stored."""
            if not writer.stored:
                return
            now = time.time()
            stored = StoredResponse(
                id=writer.id,
                tenant=tenant,
                created_at=now,
                session=session,
                previous=request.previous,
                response=writer.response,
                items=request.items,
                begun=now - (time.perf_counter() - exchange.record.started),
            )
            writer.stored = await self.keeper.put(stored)

        return keep


@contextmanager
def _own_names(request: ResponsesRequest) -> Iterator[None]:
    """Have errors name the fields of the request instead of those of its chat."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = error.param and request.own_name(error.param)
        raise


def _check_history(history: History, backend: OpenAIBackend) -> None:
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


Keep = Callable[[EventWriter], Awaitable[None]]
"""Called with a finished answer, before its client is told that it is."""


async def send_whole(deltas: AsyncGenerator[Delta], writer: EventWriter, exchange: Exchange, keep: Keep) -> None:
    """Answer with one response object."""
    account = exchange.account
    async with aclosing(deltas), exchange.deadline.limit():
        async for delta in deltas:
            await account.grow(delta.size)
            note(exchange.record, delta)
            for _ in writer.write(delta):
                pass
    for _ in writer.close():
        pass
    await keep(writer)
    await respond(exchange.send, await account.run(account.answer, json_response, writer.response))


async def send_events(
    deltas: AsyncGenerator[Delta], writer: EventWriter, exchange: Exchange, keep: Keep, *, obfuscate: bool = False
) -> None:
    """Answer with typed events, filled up to equal sizes if `obfuscate`.

    An error before the first delta is raised and gets its own HTTP status; a later one ends with `response.failed`.
    """
    record, account, encoded = exchange.record, exchange.account, obfuscated if obfuscate else encode

    async def out(events: Iterable[dict[str, Any]]) -> None:
        for one in events:
            await send_piece(exchange.send, named_event(one["type"], encoded(one)))

    async def write(delta: Delta) -> None:
        await account.grow(delta.size)  # the stream ends with the whole answer
        note(record, delta)
        await out(writer.write(delta))

    async with aclosing(deltas):
        async with exchange.deadline.limit():
            first = await anext(deltas, Delta(finish_reason="stop"))
        await exchange.send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        await out(writer.begin())
        try:
            async with exchange.deadline.limit():
                await write(first)
                async for delta in deltas:
                    await write(delta)
            await out(writer.close())
            await keep(writer)
            await out([writer.last()])
        except Exception as error:
            record_failure(record, error)
            await out([writer.fail(*failure(error, record.request_id))])
    await exchange.send({"type": "http.response.body", "body": b""})


def failure(error: Exception, request_id: str) -> tuple[str, str]:
    """OpenAI's code for an error inside a response, and what the client is told."""
    code = "server_error"
    if isinstance(error, OverloadedError):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequestError):
        code = "invalid_prompt"
    body = json.loads(without_account(error_response(error, request_id).body))
    return code, str(body["error"]["message"])
