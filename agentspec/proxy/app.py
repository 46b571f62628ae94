"""The gateway's application and its routes. A path that is not listed here reaches no upstream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from agentspec.backends.base import CHAT, COMPLETIONS, EMBEDDINGS, Forwards, ReportsMetrics
from agentspec.errors import ModelNotFoundError, PermissionDeniedError, UpstreamStatusError, UpstreamTimeoutError
from agentspec.protocol.responses import encode
from agentspec.proxy.admission.auth import Authenticator
from agentspec.proxy.admission.concurrency import ConcurrencyLimiter
from agentspec.proxy.admission.limits import Deadlines
from agentspec.proxy.body.budget import BodyBudget
from agentspec.proxy.body.head import check_head
from agentspec.proxy.endpoint import GenerationEndpoint
from agentspec.proxy.forwarding.passthrough import request_headers
from agentspec.proxy.hosts import HostCheck
from agentspec.proxy.loading import Loading
from agentspec.proxy.logs import logger
from agentspec.proxy.middleware import GatewayMiddleware
from agentspec.proxy.request_record import RequestRecord
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.telemetry.metrics import CONTENT_TYPE, Metrics
from agentspec.telemetry.samples import BackendSample

VERSION = version("agentspec")
MODELS_SECONDS = 10.0  # to list the models of an upstream
Handler = Callable[[Request], Awaitable[Response]]


def create_app(runtime: Runtime, settings: Settings | None = None) -> GatewayMiddleware:
    """The gateway as an ASGI application, to be run with its lifespan.

    The lifespan starts the runtime in a thread; until that is done, generation requests get 503. The end of the
    lifespan closes the runtime. Raises `ConfigurationError` for an API key that cannot be read.
    """
    settings = settings or runtime.settings
    server = settings.server
    limiter = ConcurrencyLimiter(server)
    budget = BodyBudget(server.max_body_memory, server.parsing_threads, shared=bool(server.api_keys))
    upstreams = [name for name, backend in settings.backends.items() if not backend.local]
    if server.stream_pacing and upstreams:
        logger.warning("server.stream_pacing does not pace forwarded streams", backends=upstreams)
    pages = Pages(runtime, limiter)
    paths, deadlines = (CHAT, COMPLETIONS, EMBEDDINGS), Deadlines()
    endpoints = [GenerationEndpoint(path, runtime, server, limiter, budget, deadlines) for path in paths]
    routes = [_RecordedRoute(f"/v1{one.path}", one, "POST", "uses_models") for one in endpoints]
    routes += [_RecordedRoute(path, handler, "GET") for path, handler in pages.routes().items()]
    routes.append(_RecordedRoute("/metrics", pages.metrics, "GET", "reads_metrics"))
    loading = Loading(runtime)
    router = Router(routes, redirect_slashes=False, default=_unknown, lifespan=lambda _: loading.lifespan())
    authenticator, hosts = Authenticator(server.api_keys), HostCheck(server)
    return GatewayMiddleware(
        router, authenticator, hosts, limiter, deadlines, pages.registry, loading, endpoints, runtime, budget
    )


class Pages:
    """The routes that describe the gateway: its state, version, models and metrics. `registry` holds the metrics."""

    def __init__(self, runtime: Runtime, limiter: ConcurrencyLimiter) -> None:
        self._runtime = runtime
        self._limiter = limiter
        self._created = int(time.time())
        self._samples: list[BackendSample] = []
        self.registry = Metrics(
            version=VERSION,
            models=runtime.models(),
            index_size=lambda: _index_size(runtime),
            backends=lambda: self._samples,
            tenants=limiter.samples,
        )

    def routes(self) -> dict[str, Handler]:
        return {
            "/health": self.health,
            "/ready": self.ready,
            "/version": self.version,
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
        }

    async def health(self, request: Request) -> Response:
        """Report that the process answers; nothing else is checked."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Report whether the gateway accepts requests: 200, or 503 while it loads, drains, or has a failed backend."""
        status = "draining" if self._limiter.closed else "ready" if self._runtime.ready else "loading"
        if self._runtime.failure is not None:
            status = "failed"
        return _json({"status": status}, 200 if status == "ready" else 503)

    async def version(self, request: Request) -> Response:
        return _json({"version": VERSION})

    async def metrics(self, request: Request) -> Response:
        self._samples = await _samples(self._runtime)
        return Response(await anyio.to_thread.run_sync(self.registry.render), headers={"content-type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": await self._objects(request)})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        found = next((model for model in await self._objects(request) if model["id"] == name), None)
        if found is None:
            raise ModelNotFoundError(f"no model {name[:256]!r} here", param="model")
        return _json(found)

    async def _objects(self, request: Request) -> list[dict[str, Any]]:
        """The configured models; without any, the models of the sole upstream, which then accepts any name."""
        names = self._runtime.models()
        if names or not (self._runtime.ready and self._runtime.takes_any_model):
            return [self._object(name) for name in names]
        backend = self._runtime.route("*").backend
        check_head(request.scope)
        record = RequestRecord.of(request.scope)
        try:
            headers = request_headers(request.scope, record)
            async with asyncio.timeout(MODELS_SECONDS):
                return await backend.models(headers) if isinstance(backend, Forwards) else []
        except TimeoutError:
            raise UpstreamTimeoutError("the upstream did not list its models in time") from None
        except UpstreamStatusError as error:
            error.for_client = not (record.has_gateway_key or error.own_key)
            raise

    def _object(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "agentspec"}


class _RecordedRoute(Route):
    """A route that first stores its path in the request's record, so that failed requests have it too.

    Raises `PermissionDeniedError` if the identity of the request's key lacks the `permission`.
    """

    def __init__(self, path: str, handler: Any, method: str, permission: str = "") -> None:
        super().__init__(path, handler, methods=[method], include_in_schema=False)
        self._permission = permission

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord.of(scope)
        record.route = self.path
        if self._permission and not getattr(record.identity, self._permission):
            wanted = "a tenant's" if self._permission == "uses_models" else "an operator's"
            raise PermissionDeniedError(f"this route needs {wanted} API key (role in server.api_keys)")
        await super().handle(scope, receive, send)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
        return
    raise HTTPException(404)


def _index_size(runtime: Runtime) -> tuple[int, int, int] | None:
    """Bytes and sequences of the token index, unreadable rows of its database; None if no local engine keeps one."""
    local = any(backend.local for backend in runtime.settings.backends.values())
    if not (local and runtime.ready):
        return None
    stats = runtime.cache.stats()
    return stats.memory_bytes, stats.sequences, stats.damaged


async def _samples(runtime: Runtime) -> list[BackendSample]:
    """The current counts of all backends that report any."""
    counting = {name: backend for name, backend in runtime.backends().items() if isinstance(backend, ReportsMetrics)}
    found = await asyncio.gather(*(backend.metrics(name) for name, backend in counting.items()))
    return [sample for sample in found if sample is not None]


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")
