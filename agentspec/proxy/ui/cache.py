"""What the view *Cache* shows, and the deletion that it offers. A tenant sees and deletes its own, an operator all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import anyio
from pydantic import BeforeValidator
from starlette.requests import Request
from starlette.responses import Response

from agentspec.backends.base import is_local
from agentspec.cache.settings import parse_span
from agentspec.protocol.validation import Closed, Refused, Text
from agentspec.proxy.api import json_response
from agentspec.proxy.body.reading import parse_object, read_body
from agentspec.proxy.endpoint import Services
from agentspec.proxy.middleware import RecordedRoute
from agentspec.proxy.routes.pages import Pages
from agentspec.proxy.ui.workflows import visible_tenant
from agentspec.runtime import Runtime

MOST_BYTES = 16 << 10  # of a body that says what to forget


def cache_routes(services: Services, pages: Pages) -> Iterator[RecordedRoute]:
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

    yield RecordedRoute("/ui/data/cache", cache, "GET")
    yield RecordedRoute("/ui/data/cache/forget", forget, "POST")


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
