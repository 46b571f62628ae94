"""Stored responses: written and read off the loop, and the route on which clients read and delete them."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import anyio
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from agentspec.backends.base import RESPONSES
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.cache.stored import StoredResponse
from agentspec.errors import CacheError, InvalidRequestError
from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.openai_responses.items import Item, is_id
from agentspec.protocol.requests import MAX_MESSAGES
from agentspec.protocol.responses import ApiWriter
from agentspec.protocol.validation import shown_name
from agentspec.protocol.wire import SseDecoder, encode, named_event, object_in
from agentspec.proxy.admission import Deadline, until_disconnect
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.api import json_response, respond
from agentspec.proxy.body.budget import RequestBody
from agentspec.proxy.body.stored_names import refuse_unowned_names
from agentspec.proxy.errors import ErrorResponse
from agentspec.proxy.forwarding import Inspector, forward
from agentspec.proxy.logs import logger
from agentspec.proxy.request_context import RequestContext, first_lines
from agentspec.runtime import Route, Runtime
from agentspec.settings.server import ServerSettings

if TYPE_CHECKING:
    from agentspec.cache.response_store import ResponseStore
    from agentspec.proxy.endpoint import Services

T = TypeVar("T")

THREADS = 8
MAX_STORED_ID = 128
MAX_CHAIN = 512
"""Answers that one conversation may consist of."""


class ResponseNotFoundError(InvalidRequestError):
    """There is no such stored response, or it is another tenant's, which must look the same."""

    status = 404
    code = "response_not_found"


def not_found(id: str, param: str) -> ResponseNotFoundError:
    return ResponseNotFoundError(f"no response {id[:80]!r} is stored here", param=param)


@dataclass(slots=True)
class Keeper:
    """The stored answers of a gateway. Its methods wait for the store in one of its own threads."""

    runtime: Runtime
    limits: ServerSettings
    _threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(THREADS))

    @property
    def stores(self) -> bool:
        return self.runtime.settings.cache.store

    async def store(self, writer: ApiWriter, context: RequestContext, seconds: float) -> None:
        """Store the answer of `writer`, to a request that came `seconds` ago."""
        assert isinstance(writer, EventWriter)
        request, now = writer.request, time.time()
        writer.stored = await self.put(
            StoredResponse(
                id=writer.id,
                tenant=context.tenant,
                created_at=now,
                session=context.labels.session,
                previous=request.previous,
                response=writer.body(),
                items=request.items,
                begun=now - seconds,
            )
        )

    async def put(self, stored: StoredResponse) -> bool:
        """Store an answer; False, with a warning in the log, if that cannot be done."""
        try:
            return await self._in_thread(lambda: self._store.put(replace(stored, id=_key(stored.id))))
        except CacheError as error:
            logger.warning("a response is not stored", error=error.message)
            return False

    async def get(self, tenant: str, id: str, param: str = "id") -> StoredResponse:
        found = await self._in_thread(lambda: self._store.get(tenant, _key(id))) if self.stores and is_id(id) else None
        if found is None:
            raise not_found(id, param)
        return replace(found, id=id)

    async def discard(self, tenant: str, id: str) -> bool:
        """Delete the tenant's answer if it is there; returns whether it was."""
        return is_id(id) and await self._in_thread(lambda: self._store.delete(tenant, _key(id)))

    async def history(self, tenant: str, id: str) -> tuple[list[Item], int]:
        """The items of the answer `id`, of the ones that it continues, and of their inputs, oldest first; their bytes.

        Raises `ResponseNotFoundError`, and `InvalidRequestError` for a conversation that is too long.
        """
        if not (self.stores and is_id(id)):
            raise not_found(id, "previous_response_id")
        return await self._in_thread(lambda: self._history(tenant, id))

    def _history(self, tenant: str, id: str) -> tuple[list[Item], int]:
        most_items, most_bytes = MAX_MESSAGES, self.limits.max_body_bytes
        links: list[list[Item]] = []
        count = size = 0
        wanted: str | None = id
        while wanted is not None:
            stored = self._store.get(tenant, wanted)
            if stored is None or stored.backend is not None:
                if wanted == id:
                    raise not_found(id, "previous_response_id")
                message = f"the response {id!r} continues {wanted!r}, which is not stored any more"
                raise ResponseNotFoundError(message, param="previous_response_id")
            links.append([*map(dict, stored.items), *stored.response.get("output", ())])
            count, size = count + len(links[-1]), size + len(encode(links[-1]))
            if len(links) > MAX_CHAIN or count > most_items or size > most_bytes:
                message = "the conversation that previous_response_id continues is too long to be read again"
                raise InvalidRequestError(message, param="previous_response_id")
            wanted = stored.previous
        return [item for link in reversed(links) for item in link], size

    async def follow(self, context: RequestContext, body: RequestBody, answer: RequestAnswer, *, several: bool) -> None:
        """Record which tenant a response belongs to that the upstream stores, once the upstream sends its id.

        With `several` tenants, raises `ResponseNotFoundError` if the request continues a response that its tenant did
        not get there, and `InvalidRequestError` for what another tenant may have stored.
        """
        fields, backend = body.fields, context.route.backend_name
        if several:
            refuse_unowned_names(fields)
            if (previous := fields.get("previous_response_id")) is not None:
                stored = await self.get(context.tenant, str(previous), "previous_response_id")
                if stored.backend != backend:
                    raise not_found(str(previous), "previous_response_id")
        if not context.store or fields.get("store") is False:
            return

        async def found(id: str) -> None:
            if self.stores:
                await self.put(StoredResponse(id, context.tenant, time.time(), context.labels.session, backend=backend))

        answer.watch = IdWatch(found)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._threads)

    @property
    def _store(self) -> ResponseStore:
        return self.runtime.cache.responses


def _key(id: str) -> str:
    """The id under which a response is stored, of few characters. No client can ask for one with a blank."""
    return id if len(id) <= MAX_STORED_ID else f"long {hashlib.sha256(id.encode()).hexdigest()}"


_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})')
_FIRST_EVENTS = 1 << 20  # bytes in which the id of a response must come


class ResponsesInspector(Inspector):
    """Follows a stream of the Responses API."""

    telling = re.compile(rb'"(?:response\.(?:completed|incomplete|failed|cancelled)|error)"')

    def __init__(self) -> None:
        super().__init__()
        self._number = -1

    def read(self, events: bytes) -> None:
        if numbers := _NUMBER.findall(events):
            self._number = int(numbers[-1])
        super().read(events)

    def failure(self, error: ErrorResponse, request_id: str) -> bytes:
        """The API's `error` event, with the number that comes next."""
        body = object_in(error.body)["error"]
        event = {"type": "error", "code": body.get("code"), "message": body["message"], "param": body.get("param")}
        return named_event("error", encode({**event, "sequence_number": self._number + 1}))

    def read_event(self, event: Mapping[str, Any]) -> None:
        kind, response = event.get("type"), event.get("response")
        if kind == "error":
            self.error = self.error or event
        if kind in _ENDS:
            self.done = True
            self.counts = response if isinstance(response, dict) else {}
            self.error = self.error or self.counts.get("error")


Found = Callable[[str], Awaitable[None]]


class IdWatch:
    """Calls `found` with the id of the response that is sent, before anything with that id is sent.

    The id is the response's own member, in its JSON or in one of the first events of its stream: what a client wrote
    comes back in others.
    """

    def __init__(self, found: Found) -> None:
        self._found = found
        self._decoder: SseDecoder | None = None
        self._left = 0  # bytes in which the id must come

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 400:
            kind = dict(message["headers"]).get(b"content-type", b"")  # upstreams do not stream whatever is asked for
            self._decoder = SseDecoder() if kind.lower().startswith(b"text/event-stream") else None
            self._left = _FIRST_EVENTS
        elif self._left > 0:
            id = next(_ids_in(message["body"], self._decoder), None)
            self._left = 0 if id or self._decoder is None else self._left - len(message["body"])
            if id:
                await self._found(id)


def _ids_in(data: bytes, decoder: SseDecoder | None) -> Iterator[str]:
    events = [data] if decoder is None else decoder.feed(data)
    for value in map(object_in, events):
        response = value if decoder is None else value.get("response")
        if isinstance(response, dict) and is_id(id := response.get("id")):
            yield id


@dataclass(slots=True)
class StoredRoute:
    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, services = RequestAnswer.of(scope), self.services
        async with until_disconnect(receive), services.slots.enter(answer.tenant):
            deadline = Deadline(services.settings.request_timeout, services.deadlines)
            id = scope["path_params"]["id"]
            async with deadline.limit():
                stored = await self._find(answer.tenant, id)
                found = await self._body(Request(scope), stored) if stored.backend is None else None
            if found is not None:
                await respond(answer, json_response(found))
            else:
                await self._forward(scope, answer, stored, deadline)

    async def _find(self, tenant: str, id: str) -> StoredResponse:
        """The tenant's response. One that is unknown here may be stored at the sole upstream of a sole tenant."""
        services = self.services
        try:
            return await services.keeper.get(tenant, id)
        except ResponseNotFoundError:
            backends = services.ready().backends()
            upstreams = [name for name, backend in backends.items() if isinstance(backend, OpenAIBackend)]
            if not is_id(id) or services.several_tenants or len(upstreams) != 1:
                raise
            return StoredResponse(id, tenant, 0.0, backend=upstreams[0])

    async def _body(self, request: Request, stored: StoredResponse) -> Mapping[str, Any]:
        _refuse_query(request.query_params)
        if request.method != "DELETE":
            return stored.response
        if not await self.services.keeper.discard(stored.tenant, stored.id):
            raise not_found(stored.id, "id")
        return {"id": stored.id, "object": "response", "deleted": True}

    async def _forward(self, scope: Scope, answer: RequestAnswer, stored: StoredResponse, deadline: Deadline) -> None:
        services, name = self.services, stored.backend or ""
        backend = services.ready().backends().get(name)
        if not isinstance(backend, OpenAIBackend):
            raise not_found(stored.id, "id")
        route = Route(name, backend, "")
        context = RequestContext.of(scope, first_lines(scope), {}, answer, RESPONSES, deadline, route)
        async with deadline.limit():
            if not await backend.has_route(RESPONSES, context.headers):
                raise not_found(stored.id, "id")
        if context.method == "DELETE" and services.keeper.stores:
            answer.watch = partial(self._discard, stored)
        path = f"{RESPONSES}/{quote(stored.id, safe='')}"
        with services.budget.body(answer.tenant) as body:
            await forward(context, body, answer, ResponsesInspector(), b"", path=path)

    async def _discard(self, stored: StoredResponse, message: Message) -> None:
        """Forget the response's tenant before the client reads that the response is gone."""
        if message["type"] == "http.response.start" and message["status"] < 400:
            await self.services.keeper.discard(stored.tenant, stored.id)


def _refuse_query(query: QueryParams) -> None:
    for name, value in query.multi_items():
        if value not in ("", "false"):
            shown = shown_name(name)
            raise InvalidRequestError(f"{shown!r} is not supported here", param=shown)
