"""Stored responses: written and read off the loop, and the route on which clients read and delete them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
from agentspec.protocol.openai_responses.items import Item, is_id
from agentspec.protocol.requests import MAX_MESSAGES
from agentspec.protocol.validation import shown_name
from agentspec.protocol.wire import encode
from agentspec.proxy.admission import Deadline, until_disconnect
from agentspec.proxy.body.upstream_fields import check_head
from agentspec.proxy.endpoint import GenerationEndpoint
from agentspec.proxy.forwarding import Arrival, pass_through, request_headers
from agentspec.proxy.logs import logger
from agentspec.proxy.request_record import RequestRecord
from agentspec.proxy.responses.upstreams import ResponsesInspector
from agentspec.proxy.streaming import json_response, respond
from agentspec.runtime import Runtime
from agentspec.settings.server import ServerSettings

if TYPE_CHECKING:
    from agentspec.cache.side_stores import ResponseStore

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


@dataclass(frozen=True, slots=True)
class History:
    """The items of the answers that a request continues, and the bytes that they take."""

    items: list[Item]
    size: int


@dataclass(slots=True)
class Keeper:
    """The stored answers of a gateway. Its methods wait for the store in one of its own threads."""

    runtime: Runtime
    limits: ServerSettings
    _threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(THREADS))

    @property
    def stores(self) -> bool:
        """Whether anything may be kept."""
        return self.runtime.settings.cache.store

    async def put(self, stored: StoredResponse) -> bool:
        """Store an answer; False, with a warning in the log, if that cannot be done."""
        try:
            return await self._in_thread(lambda: self._store.put(replace(stored, id=_key(stored.id))))
        except CacheError as error:
            logger.warning("a response is not stored", error=error.message)
            return False

    async def get(self, tenant: str, id: str, param: str = "id") -> StoredResponse:
        """The tenant's answer. Raises `ResponseNotFoundError`."""
        found = await self._in_thread(lambda: self._store.get(tenant, _key(id))) if self.stores and is_id(id) else None
        if found is None:
            raise not_found(id, param)
        return replace(found, id=id)

    async def delete(self, tenant: str, id: str) -> None:
        """Raises `ResponseNotFoundError`."""
        if not (self.stores and await self.discard(tenant, id)):
            raise not_found(id, "id")

    async def discard(self, tenant: str, id: str) -> bool:
        """Delete the tenant's answer if it is there; returns whether it was."""
        return is_id(id) and await self._in_thread(lambda: self._store.delete(tenant, _key(id)))

    async def history(self, tenant: str, id: str) -> History:
        """The items of the answer `id`, of the ones that it continues, and of their inputs, oldest first.

        Raises `ResponseNotFoundError`, and `InvalidRequestError` for a conversation that is too long.
        """
        if not (self.stores and is_id(id)):
            raise not_found(id, "previous_response_id")
        return await self._in_thread(lambda: self._history(tenant, id))

    def _history(self, tenant: str, id: str) -> History:
        most_items, most_bytes = MAX_MESSAGES, self.limits.max_body_bytes
        links: list[list[Item]] = []
        count = size = 0
        wanted: str | None = id
        while wanted is not None:
            stored = self._store.get(tenant, wanted)
            if stored is None or stored.backend is not None:
                raise _missing(id, wanted)
            links.append([*map(dict, stored.items), *stored.response.get("output", ())])
            count, size = count + len(links[-1]), size + len(encode(links[-1]))
            if len(links) > MAX_CHAIN or count > most_items or size > most_bytes:
                message = "the conversation that previous_response_id continues is too long to be read again"
                raise InvalidRequestError(message, param="previous_response_id")
            wanted = stored.previous
        return History([item for link in reversed(links) for item in link], size)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._threads)

    @property
    def _store(self) -> ResponseStore:
        return self.runtime.responses


def _missing(id: str, wanted: str) -> ResponseNotFoundError:
    if wanted == id:
        return not_found(id, "previous_response_id")
    message = f"the response {id!r} continues {wanted!r}, which is not stored any more"
    return ResponseNotFoundError(message, param="previous_response_id")


def _key(id: str) -> str:
    """The id under which stores keep a response: they take few characters. Nobody can ask for one with a blank."""
    return id if len(id) <= MAX_STORED_ID else f"long {hashlib.sha256(id.encode()).hexdigest()}"


@dataclass(slots=True)
class StoredRoute:
    """`GET` and `DELETE` of one stored response, as an ASGI application."""

    endpoint: GenerationEndpoint
    keeper: Keeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord.of(scope)
        async with until_disconnect(receive), self.endpoint.limiter.enter(record.tenant):
            deadline = self.endpoint.deadlines.start(self.endpoint.settings.request_timeout)
            await self._admitted(Request(scope), record, send, deadline)

    async def _admitted(self, request: Request, record: RequestRecord, send: Send, deadline: Deadline) -> None:
        id = request.path_params["id"]
        if not is_id(id):
            raise not_found(id, "id")
        async with deadline.limit():
            stored = await self._find(record, id)
            body = await self._body(request, record, stored) if stored.backend is None else {}
        if stored.backend is None:
            await respond(send, json_response(body))
        else:
            await self._forward(request, send, stored, deadline)

    async def _find(self, record: RequestRecord, id: str) -> StoredResponse:
        """The tenant's response. One that is unknown here may be kept at the sole upstream of a sole tenant."""
        try:
            return await self.keeper.get(record.tenant, id)
        except ResponseNotFoundError:
            backends = self.endpoint.ready().backends()
            upstreams = [name for name, backend in backends.items() if isinstance(backend, OpenAIBackend)]
            if self.endpoint.several_tenants or len(upstreams) != 1:
                raise
            return StoredResponse(id, record.tenant, 0.0, backend=upstreams[0])

    async def _forward(self, request: Request, send: Send, stored: StoredResponse, deadline: Deadline) -> None:
        """Let the upstream that keeps the response answer."""
        backend = self.endpoint.ready().backends().get(stored.backend or "")
        if backend is None or not isinstance(backend, OpenAIBackend):
            raise not_found(stored.id, "id")
        check_head(request.scope)
        record = RequestRecord.of(request.scope)
        async with deadline.limit():
            if not await backend.has_route(RESPONSES, request_headers(request.scope, record)):
                raise not_found(stored.id, "id")
        path = f"{RESPONSES}/{quote(stored.id, safe='')}"
        if request.method == "DELETE" and self.keeper.stores:
            send = self._discarding(send, record.tenant, stored.id)
        # The answer to HEAD has a length and no body to wait for; our own server leaves that of GET out.
        inspector, method = ResponsesInspector(), "GET" if request.method == "HEAD" else request.method
        with self.endpoint.budget.account(record.tenant) as account:
            arrival = Arrival(request.scope, send, deadline, account)
            await pass_through(arrival, backend, path, b"", inspector, method=method)

    def _discarding(self, send: Send, tenant: str, id: str) -> Send:
        """Wrap `send` to forget whose the response was before the client is told that it is gone."""

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                await self.keeper.discard(tenant, id)
            await send(message)

        return watched

    async def _body(self, request: Request, record: RequestRecord, stored: StoredResponse) -> Mapping[str, Any]:
        _refuse_query(request.query_params)
        if request.method != "DELETE":
            return stored.response
        await self.keeper.delete(record.tenant, stored.id)
        return {"id": stored.id, "object": "response", "deleted": True}


def _refuse_query(query: QueryParams) -> None:
    for name, value in query.multi_items():
        if value not in ("", "false"):
            shown = shown_name(name)
            raise InvalidRequestError(f"{shown!r} is not supported here", param=shown)
