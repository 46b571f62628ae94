"""What views of the page fetch: *Now* the figures of the gateway, *Workflows* calls of each tenant by step, *Cache*
what it holds, with the deletion that it offers. A tenant sees and deletes its own, an operator all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import anyio
from pydantic import BeforeValidator
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentspec.backends.base import is_local
from agentspec.cache.settings import parse_span
from agentspec.errors import OverloadedError
from agentspec.protocol.validation import Closed, Refused, Text
from agentspec.protocol.wire import encode, event
from agentspec.proxy.admission import Slots, until_disconnect
from agentspec.proxy.answer import EVENT_STREAM, RequestAnswer, piece
from agentspec.proxy.api import json_response
from agentspec.proxy.body.reading import parse_object, read_body
from agentspec.proxy.endpoint import Services
from agentspec.proxy.middleware import RecordedRoute
from agentspec.proxy.routes.pages import Pages
from agentspec.runtime import Runtime
from agentspec.telemetry.history import POINTS

MOST_VIEWERS = 16
EVENT_SECONDS = 2.0
MOST_BYTES = 16 << 10  # of a body that says what to forget


def data_routes(services: Services, pages: Pages) -> Iterator[RecordedRoute]:
    async def workflows(request: Request) -> Response:
        shown = visible_tenant(request)
        rows: list[dict[str, Any]] = []
        for tenant, statistics in list(pages.steps.items()):
            if shown in (None, tenant):
                rows += [{"tenant": tenant, **asdict(row)} for row in statistics.rows()]
        return json_response({"rows": rows})

    async def cache(request: Request) -> Response:
        runtime, tenant = services.ready(), visible_tenant(request)
        return json_response(await anyio.to_thread.run_sync(_holdings, runtime, tenant))

    async def forget(request: Request) -> Response:
        """Delete as `agentspec cache forget` does, and answer how many sequences went."""
        runtime, tenant = services.ready(), visible_tenant(request)
        asked = _Forgetting.parse(parse_object(await read_body(request.headers, request.receive, MOST_BYTES)))
        chosen: dict[str, Any] = asked.given("session", "tenant", "older_than") | (
            {} if tenant is None else {"tenant": tenant}
        )
        forgotten = await anyio.to_thread.run_sync(lambda: runtime.cache.forget(**chosen))
        pending = await anyio.to_thread.run_sync(lambda: runtime.cache.stats().erasure_pending)
        return json_response({"forgotten": forgotten, "erasure_pending": pending})

    yield RecordedRoute("/ui/data/now", NowStream(pages, services.slots), "GET", "reads_metrics")
    yield RecordedRoute("/ui/data/workflows", workflows, "GET")
    yield RecordedRoute("/ui/data/cache", cache, "GET")
    yield RecordedRoute("/ui/data/cache/forget", forget, "POST")


def visible_tenant(request: Request) -> str | None:
    """The tenant that the request's key may see; None: an operator's, which sees all."""
    key = RequestAnswer.of(request.scope).key
    assert key is not None
    return None if key.reads_metrics else key.tenant


@dataclass(slots=True)
class NowStream:
    """A stream of events, each with the figures of `now`, and the `points` of the history that are new to the viewer.
    It ends with its viewer, or when the gateway drains.
    """

    pages: Pages
    slots: Slots
    viewers: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.viewers >= MOST_VIEWERS:
            raise OverloadedError(f"{MOST_VIEWERS} viewers watch this gateway already; close one, or try again later")
        gauge = self.pages.registry.in_flight
        self.viewers += 1
        gauge.dec()  # who watches is no load
        try:
            async with until_disconnect(receive):
                await self._send(RequestAnswer.of(scope))
        finally:
            gauge.inc()
            self.viewers -= 1

    async def _send(self, answer: RequestAnswer) -> None:
        history, seen = self.pages.history, 0
        await answer.send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        while not self.slots.closed:
            now, new = await history.now(), history.added - seen
            points = list(history.points)[-new:] if new else []
            seen += new
            shown = {"most": POINTS, "points": points, "now": now}
            await answer.send(piece(event(encode(shown))))
            await asyncio.sleep(EVENT_SECONDS)
        await answer.send({"type": "http.response.body", "body": b""})


def _span(value: Any) -> Any:
    try:
        return parse_span(value)
    except ValueError as error:
        raise Refused(f": {error}") from None


class _Forgetting(Closed):
    """The conditions, all of which must hold."""

    session: Text | None = None
    tenant: Text | None = None
    older_than: Annotated[float, BeforeValidator(_span)] | None = None


def _holdings(runtime: Runtime, tenant: str | None) -> dict[str, Any]:
    """The namespaces in memory, and the bytes of each tenant on disk, where a local engine keeps an index."""
    if not runtime.keeps_index:
        return {"index": False, "namespaces": [], "disk": {}}
    engines = {name: backend for name, backend in runtime.backends().items() if is_local(backend, "namespace")}
    names = {engine.namespace("").model_fingerprint: name for name, engine in engines.items()}
    namespaces = []
    for one in runtime.cache.namespaces(tenant):
        figures, known = asdict(one), one.namespace.model_fingerprint
        figures["namespace"] = one.namespace.key[:12]
        namespaces.append({"tenant": one.namespace.tenant, "model": names.get(known, known[:12]), **figures})
    disk = {name: size for name, size in runtime.cache.disk_bytes().items() if tenant in (None, name)}
    return {"index": True, "namespaces": namespaces, "disk": disk}
