"""The gateway's routes, and nothing beside them: a path that is not listed here reaches no upstream."""

from __future__ import annotations

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

from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import TorchSettings
from agentspec.errors import ModelNotFoundError
from agentspec.proxy.auth import Keys
from agentspec.proxy.concurrency_limiter import Gate
from agentspec.proxy.endpoint import Generation, Path
from agentspec.proxy.loading import Loading
from agentspec.proxy.middleware import Door
from agentspec.proxy.passthrough import request_headers
from agentspec.proxy.request_record import Exchange
from agentspec.proxy.responses import encode
from agentspec.proxy.upstream_metrics import UpstreamCounters
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.telemetry.metrics import CONTENT_TYPE, EngineSample, Metrics

VERSION = version("agentspec")
GENERATING: tuple[Path, ...] = ("/chat/completions", "/completions", "/embeddings")
Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(runtime: Runtime, settings: Settings | None = None) -> Door:
    """The gateway as an ASGI application, to be run with its lifespan.

    The lifespan starts the runtime in a thread; generating requests are answered 503 until that is done. Its end closes
    the runtime. Raises `ConfigurationError` for an API key that cannot be read.
    """
    settings = settings or runtime.settings
    gate = Gate(settings.server.max_concurrent)
    upstreams = UpstreamCounters(runtime)
    metrics = Metrics(
        version=VERSION,
        models=runtime.models(),
        index_size=lambda: _index_size(runtime),
        engines=lambda: _engines(runtime),
        upstreams=lambda: upstreams.samples,
    )
    pages = Pages(runtime, gate, metrics, upstreams)
    routes = [_route(path, endpoint, "GET") for path, endpoint in pages.routes().items()]
    for path in GENERATING:
        routes.append(_route(f"/v1{path}", Generation(path, runtime, settings.server, gate), "POST"))
    loading = Loading(runtime)
    router = Router(routes, redirect_slashes=False, default=_unknown, lifespan=lambda _: loading.lifespan())
    return Door(router, Keys(settings.server.api_keys), gate, metrics, loading)


class Pages:
    """The routes that only tell something."""

    def __init__(self, runtime: Runtime, gate: Gate, metrics: Metrics, upstreams: UpstreamCounters) -> None:
        self._runtime = runtime
        self._gate = gate
        self._metrics = metrics
        self._upstreams = upstreams
        self._created = int(time.time())

    def routes(self) -> dict[str, Endpoint]:
        return {
            "/health": self.health,
            "/ready": self.ready,
            "/version": self.version,
            "/metrics": self.metrics,
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
        }

    async def health(self, request: Request) -> Response:
        """The process lives; nothing more."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether a request sent now would be taken: 200, or 503 while loading or draining."""
        status = "draining" if self._gate.closed else "ready" if self._runtime.ready else "loading"
        return _json({"status": status}, 200 if status == "ready" else 503)

    async def version(self, request: Request) -> Response:
        return _json({"version": VERSION})

    async def metrics(self, request: Request) -> Response:
        await self._upstreams.fetch()
        return Response(await anyio.to_thread.run_sync(self._metrics.render), headers={"content-type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": await self._objects(request)})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        found = next((model for model in await self._objects(request) if model["id"] == name), None)
        if found is None:
            raise ModelNotFoundError(f"no model {name!r} here", param="model")
        return _json(found)

    async def _objects(self, request: Request) -> list[dict[str, Any]]:
        """The configured models; where none is, those of the sole upstream, which then takes any name."""
        names = self._runtime.models()
        if names or not (self._runtime.ready and self._runtime.takes_any_model):
            return [self._object(name) for name in names]
        backend = self._runtime.route("*").backend
        headers = request_headers(request.scope, Exchange.of(request.scope))
        return await backend.models(headers) if isinstance(backend, OpenAIBackend) else []

    def _object(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "agentspec"}


def _route(path: str, endpoint: Any, method: str) -> Route:
    return _Named(path, endpoint, methods=[method], include_in_schema=False)


class _Named(Route):
    """A route that tells the exchange its name, before anything can fail inside it."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        Exchange.of(scope).route = self.path
        await super().handle(scope, receive, send)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
        return
    raise HTTPException(404)


def _index_size(runtime: Runtime) -> tuple[int, int] | None:
    """Bytes and sequences of the index; None where no local engine keeps one."""
    local = any(isinstance(backend, TorchSettings) for backend in runtime.settings.backends.values())
    if not (local and runtime.ready):
        return None
    stats = runtime.cache.stats()
    return stats.memory_bytes, stats.sequences


def _engines(runtime: Runtime) -> list[EngineSample]:
    backends: dict[str, Any] = runtime.backends()
    return [_sample(name, backend.stats()) for name, backend in backends.items() if hasattr(backend, "stats")]


def _sample(name: str, stats: Any) -> EngineSample:
    """From `EngineStats`, which is not imported here because its package needs torch."""
    return EngineSample(
        name,
        queued=stats.queued,
        active=stats.active,
        drafted=stats.drafted_by_source,
        accepted=stats.accepted_by_source,
        forwards=stats.batch_sizes,
        preempted=stats.preempted,
        rows=stats.kv_rows,
    )


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")
