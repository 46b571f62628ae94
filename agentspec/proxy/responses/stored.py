"""The routes of stored responses: one of them, its deletion, and the items of its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from agentspec.backends.base import RESPONSES, is_forwarding
from agentspec.cache.responses import StoredResponse
from agentspec.errors import InvalidRequestError
from agentspec.protocol.openai_responses.items import Item, is_id
from agentspec.protocol.validation import shown_name
from agentspec.proxy.admission.limits import Deadline, until_disconnect
from agentspec.proxy.body.upstream_fields import check_head
from agentspec.proxy.endpoint import note_disconnect
from agentspec.proxy.forwarding.passthrough import pass_through, request_headers
from agentspec.proxy.request_record import RequestRecord
from agentspec.proxy.responses.endpoint import ResponsesEndpoint
from agentspec.proxy.responses.keeping import ResponseNotFoundError, not_found
from agentspec.proxy.responses.upstreams import ResponsesInspector
from agentspec.proxy.streaming.sending import json_response, respond

MAX_PAGE = 100
PAGE = 20


@dataclass(slots=True)
class StoredRoute:
    """`GET` and `DELETE` of one stored response, as an ASGI application; with `items`, the items of its input."""

    endpoint: ResponsesEndpoint
    items: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord.of(scope)
        async with until_disconnect(receive) as client, self.endpoint.limiter.enter(record.tenant):
            deadline = self.endpoint.deadlines.start(self.endpoint.settings.request_timeout)
            await self._admitted(Request(scope), record, send, deadline)
        note_disconnect(client, record)

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
            return await self.endpoint.keeper.get(record.tenant, id)
        except ResponseNotFoundError:
            backends = self.endpoint.ready().backends()
            upstreams = [name for name, backend in backends.items() if is_forwarding(backend)]
            if self.endpoint.several_tenants or len(upstreams) != 1:
                raise
            return StoredResponse(id, record.tenant, 0.0, backend=upstreams[0])

    async def _forward(self, request: Request, send: Send, stored: StoredResponse, deadline: Deadline) -> None:
        """Let the upstream that keeps the response answer."""
        backend = self.endpoint.ready().backends().get(stored.backend or "")
        if backend is None or not is_forwarding(backend):
            raise not_found(stored.id, "id")
        check_head(request.scope)
        record = RequestRecord.of(request.scope)
        async with deadline.limit():
            if not await backend.has_route(RESPONSES, request_headers(request.scope, record)):
                raise not_found(stored.id, "id")
        path = f"{RESPONSES}/{quote(stored.id, safe='')}" + ("/input_items" if self.items else "")
        if request.method == "DELETE" and self.endpoint.keeper.stores:
            send = self._discarding(send, record.tenant, stored.id)
        # The answer to HEAD has a length and no body to wait for; our own server leaves that of GET out.
        inspector, method = ResponsesInspector(), "GET" if request.method == "HEAD" else request.method
        with self.endpoint.budget.account(record.tenant) as account:
            await pass_through(request.scope, send, backend, path, b"", deadline, inspector, method, account=account)

    def _discarding(self, send: Send, tenant: str, id: str) -> Send:
        """Wrap `send` to forget whose the response was before the client is told that it is gone."""

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                await self.endpoint.keeper.discard(tenant, id)
            await send(message)

        return watched

    async def _body(self, request: Request, record: RequestRecord, stored: StoredResponse) -> Mapping[str, Any]:
        if self.items and request.method != "DELETE":
            page = Page.of(request.query_params)
            return page.listed(await self._input(record, stored))
        _refuse_query(request.query_params, ())
        if request.method != "DELETE":
            return stored.response
        await self.endpoint.keeper.delete(record.tenant, stored.id)
        return {"id": stored.id, "object": "response", "deleted": True}

    async def _input(self, record: RequestRecord, stored: StoredResponse) -> list[Item]:
        """All items that the answer was made from: those of the answers that it continues, then its own."""
        own = [dict(item) for item in stored.items]
        if stored.previous is None:
            return own
        return [*(await self.endpoint.keeper.history(record.tenant, stored.previous)).items, *own]


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is wanted: `limit` entries behind the one with the id `after`."""

    limit: int = PAGE
    after: str | None = None
    newest_first: bool = True

    @classmethod
    def of(cls, query: QueryParams) -> Page:
        """Raises `InvalidRequestError` with `param`."""
        _refuse_query(query, ("limit", "after", "order"))
        limit, order = query.get("limit", str(PAGE)), query.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_PAGE):
            raise InvalidRequestError(f"limit must be a number from 1 to {MAX_PAGE}", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequestError("order must be asc or desc", param="order")
        return cls(int(limit), query.get("after"), order == "desc")

    def listed(self, items: Sequence[Item]) -> dict[str, Any]:
        """The page of `items`, which come oldest first. Raises `InvalidRequestError` for an unknown `after`."""
        ordered = list(reversed(items)) if self.newest_first else list(items)
        start = 0
        if self.after is not None:
            places = [place for place, item in enumerate(ordered) if item["id"] == self.after]
            if not places:
                raise InvalidRequestError(f"after: no item {self.after[:80]!r} in this list", param="after")
            start = places[-1] + 1
        page = ordered[start : start + self.limit]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return {"object": "list", "data": page, **ends, "has_more": start + self.limit < len(ordered)}


def _refuse_query(query: QueryParams, known: Sequence[str]) -> None:
    for name, value in query.multi_items():
        if name not in known and value not in ("", "false"):
            shown = shown_name(name)
            raise InvalidRequestError(f"{shown!r} is not supported here", param=shown)
