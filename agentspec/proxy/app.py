"""The gateway's application and its routes. A path that is not listed here reaches no upstream."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from agentspec.backends.base import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    ReportsMetrics,
)
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.backends.settings import TorchSettings
from agentspec.errors import (
    ConfigurationError,
    ModelNotFoundError,
    PermissionDeniedError,
    UpstreamStatusError,
    UpstreamTimeoutError,
)
from agentspec.proxy.admission.auth import Authenticator
from agentspec.proxy.admission.limits import Deadlines, until_disconnect
from agentspec.proxy.admission.slots import Slots
from agentspec.proxy.body.budget import BodyBudget
from agentspec.proxy.body.upstream_fields import check_head
from agentspec.proxy.embeddings import EmbeddingsEndpoint
from agentspec.proxy.endpoint import GenerationEndpoint
from agentspec.proxy.extra_routes import ExtraRoute, sole_upstream
from agentspec.proxy.fleet import FleetPages
from agentspec.proxy.forwarding.passthrough import request_headers
from agentspec.proxy.hosts import HostCheck
from agentspec.proxy.loading import Loading
from agentspec.proxy.messages.endpoint import CountTokensEndpoint, MessagesEndpoint
from agentspec.proxy.metering.limits import Metering
from agentspec.proxy.middleware import GatewayMiddleware
from agentspec.proxy.prompts import CompletionsEndpoint
from agentspec.proxy.request_record import RequestRecord
from agentspec.proxy.responses.endpoint import ResponsesEndpoint
from agentspec.proxy.responses.stored import StoredRoute
from agentspec.proxy.streaming.sending import json_response
from agentspec.proxy.tokenization import TokenizationEndpoint
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.telemetry.metrics import CONTENT_TYPE, Metrics
from agentspec.telemetry.samples import BackendSample, IndexFigures
from agentspec.version import __version__

MODELS_SECONDS = 10.0  # to list the models of an upstream
Handler = Callable[[Request], Awaitable[Response]]
# What all endpoints have behind their path, in the order of `GenerationEndpoint`'s fields.
EndpointArguments = tuple[Runtime, ServerSettings, Slots, BodyBudget, Deadlines, Metering]


def create_app(runtime: Runtime, settings: Settings | None = None) -> GatewayMiddleware:
    """The gateway as an ASGI application, to be run with its lifespan.

    The lifespan starts the runtime in a thread; until that is done, generation requests get 503. The end of the
    lifespan closes the runtime. Raises `ConfigurationError` for an API key that cannot be read.
    """
    settings = settings or runtime.settings
    server = settings.server
    limiter = Slots(server, _most_at_once(settings))
    budget = BodyBudget(server.max_body_memory, shared=bool(server.api_keys))
    deadlines = Deadlines()
    pages = Pages(runtime, limiter)
    metering = Metering(server, pages.registry)
    common: EndpointArguments = (runtime, server, limiter, budget, deadlines, metering)
    endpoints, responses = _endpoints(settings, common)
    fleet = FleetPages(runtime)
    routes = [*_generating(endpoints), *_describing(pages, fleet), *_stored(responses)]
    _refuse_twice(routes)
    runtime.limit_upstreams(server.max_output_tokens)
    loading = Loading(runtime)
    router = Router(routes, redirect_slashes=False, default=_unknown, lifespan=lambda _: loading.lifespan())
    return GatewayMiddleware(
        routes=router,
        authenticator=Authenticator(server.api_keys),
        hosts=HostCheck(server),
        limiter=limiter,
        deadlines=deadlines,
        metrics=pages.registry,
        loading=loading,
        budget=budget,
    )


def _most_at_once(settings: Settings) -> int:
    """How many requests run at once: where all models are local, no more than their engines take."""
    takes = [one.max_active + one.max_queue for one in settings.backends.values() if isinstance(one, TorchSettings)]
    most = settings.server.max_concurrent
    return min(most, sum(takes)) if len(takes) == len(settings.backends) and takes else most


def _endpoints(settings: Settings, common: EndpointArguments) -> tuple[list[GenerationEndpoint], ResponsesEndpoint]:
    """What answers each route that uses models, chats first, and again the one that stores its answers."""
    responses = ResponsesEndpoint(RESPONSES, *common)
    endpoints: list[GenerationEndpoint] = [
        GenerationEndpoint(CHAT, *common),
        CompletionsEndpoint(COMPLETIONS, *common),
        EmbeddingsEndpoint(EMBEDDINGS, *common),
        MessagesEndpoint(MESSAGES, *common),
        CountTokensEndpoint(COUNT_TOKENS, *common),
        responses,
    ]
    endpoints += [TokenizationEndpoint(path, *common) for path in (TOKENIZE, DETOKENIZE)]
    if extra := settings.server.extra_routes:
        upstream = sole_upstream(settings)
        endpoints += [ExtraRoute(path, *common, upstream=upstream) for path in extra]
    return endpoints, responses


def _generating(endpoints: Iterable[GenerationEndpoint]) -> Iterator[_RecordedRoute]:
    for one in endpoints:
        yield _RecordedRoute(f"{one.root}{one.path}", one, "POST", "uses_models")


def _describing(pages: Pages, fleet: FleetPages) -> Iterator[_RecordedRoute]:
    for path, handler in pages.routes().items():
        yield _RecordedRoute(path, handler, "GET")
    for path, page in {"/metrics": pages.metrics, "/fleet": fleet.status}.items():
        yield _RecordedRoute(path, page, "GET", "reads_metrics")
    for path, page in {"/fleet/drain": fleet.drain, "/fleet/resume": fleet.resume}.items():
        yield _RecordedRoute(path, page, "POST", "reads_metrics")


def _stored(responses: ResponsesEndpoint) -> Iterator[_RecordedRoute]:
    """The routes that read and delete stored answers of the Responses API."""
    one = f"/v1{RESPONSES}/{{id}}"
    yield _RecordedRoute(one, StoredRoute(responses, responses.keeper), ("GET", "DELETE"), "uses_models")


class Pages:
    """The routes that describe the gateway: its state, version, models and metrics. `registry` holds the metrics."""

    def __init__(self, runtime: Runtime, limiter: Slots) -> None:
        self._runtime = runtime
        self._limiter = limiter
        self._created = int(time.time())
        self._samples: list[BackendSample] = []
        self._sampling: asyncio.Task[list[BackendSample]] | None = None
        self.registry = Metrics(
            version=__version__,
            models=runtime.models(),
            index_size=lambda: index_size(runtime),
            backends=lambda: self._samples,
            tenants=limiter.samples,
            members=lambda: runtime.fleet.samples() if runtime.fleet else (),
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
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Report whether the gateway accepts requests: 200, or 503 while it loads, drains, or has a failed backend.

        Which of these it is, only those who have a key are told.
        """
        status = "draining" if self._limiter.closed else "ready" if self._runtime.ready else "loading"
        if self._runtime.failure is not None:
            status = "failed"
        told = RequestRecord.of(request.scope).identity is not None or status == "ready"
        return json_response({"status": status if told else "not ready"}, 200 if status == "ready" else 503)

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        self._samples = await self._sampled()
        rendered = await anyio.to_thread.run_sync(self.registry.render)
        return Response(rendered, headers={"content-type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": await self._objects(request)})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        found = next((model for model in await self._objects(request) if model["id"] == name), None)
        if found is None:
            raise ModelNotFoundError(f"no model {name[:256]!r} here", param="model")
        return json_response(found)

    async def _objects(self, request: Request) -> list[dict[str, Any]]:
        """The configured models and their aliases; without any, those of the sole upstream, which accepts any name."""
        names, aliases = self._runtime.models(), [self._object(alias) for alias in self._runtime.aliases]
        if names or not (self._runtime.ready and self._runtime.takes_any_model):
            return [self._object(name) for name in names] + aliases
        backend = self._runtime.route("*").backend
        check_head(request.scope)
        listed = await self._listed(backend, request) if isinstance(backend, OpenAIBackend | PoolBackend) else []
        return listed + aliases

    async def _listed(self, backend: OpenAIBackend | PoolBackend, request: Request) -> list[dict[str, Any]]:
        """The models of an upstream. The call takes a slot like others, or clients could open any number of them."""
        record = RequestRecord.of(request.scope)
        headers = request_headers(request.scope, record)
        try:
            async with until_disconnect(request.receive), self._limiter.enter(record.tenant):
                async with asyncio.timeout(MODELS_SECONDS):
                    return await backend.models(headers)
            raise ClientDisconnect
        except TimeoutError:
            raise UpstreamTimeoutError("the upstream did not list its models in time") from None
        except UpstreamStatusError as error:
            error.for_client = not (record.has_gateway_key or error.own_key)
            raise

    async def _sampled(self) -> list[BackendSample]:
        """The current counts of all backends. Who asks while they are being asked gets the same answer."""
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.create_task(backend_samples(self._runtime))
        return await asyncio.shield(self._sampling)

    def _object(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "agentspec"}


class _RecordedRoute(Route):
    """A route that first stores its path in the request's record, so that failed requests have it too.

    Raises `PermissionDeniedError` if the identity of the request's key lacks the `permission`.
    """

    def __init__(self, path: str, handler: Any, methods: str | Sequence[str], permission: str = "") -> None:
        listed = [methods] if isinstance(methods, str) else methods
        super().__init__(path, handler, methods=listed, include_in_schema=False)
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


def _refuse_twice(routes: Sequence[Route]) -> None:
    """Raises `ConfigurationError` for an extra route that the gateway answers itself."""
    twice = [path for path, count in Counter(route.path for route in routes).items() if count > 1]
    if twice:
        raise ConfigurationError(f"server.extra_routes names {twice[0]!r}, which the gateway answers itself")


def index_size(runtime: Runtime) -> IndexFigures | None:
    """Figures of the token index and its database; None where there is no index."""
    if not runtime.keeps_index:
        return None
    stats = runtime.cache.stats()
    held = stats.memory_bytes, stats.sequences
    return IndexFigures(*held, stats.damaged, stats.unread, stats.behind, stats.erasure_pending)


async def backend_samples(runtime: Runtime) -> list[BackendSample]:
    """The current counts of all backends that report any."""
    counting = {name: backend for name, backend in runtime.backends().items() if isinstance(backend, ReportsMetrics)}
    found = await asyncio.gather(*(backend.metrics(name) for name, backend in counting.items()))
    return [sample for sample in found if sample is not None]
