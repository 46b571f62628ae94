"""The gateway as an ASGI application: its routes, its start and its end.

A path that is not listed here reaches no upstream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from time import perf_counter
from typing import Any
from weakref import WeakSet

import anyio
from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from agentspec.backends.base import COMPACT, COUNT_TOKENS, DETOKENIZE, EMBEDDINGS, INPUT_TOKENS, RESPONSES, TOKENIZE
from agentspec.backends.settings import TorchSettings
from agentspec.errors import ShuttingDownError
from agentspec.protocol.validation import shown_name
from agentspec.proxy.admission import Deadline, Slots
from agentspec.proxy.auth import Authenticator, HostCheck
from agentspec.proxy.body.budget import BodyBudget
from agentspec.proxy.completions.api import CHATS, TEXTS
from agentspec.proxy.endpoint import GatewayEndpoint, GenerationEndpoint, Services
from agentspec.proxy.logs import logger
from agentspec.proxy.messages.api import ANTHROPIC
from agentspec.proxy.metering import Metering
from agentspec.proxy.middleware import GatewayMiddleware, RecordedRoute
from agentspec.proxy.responses.api import COMPACTION, OPENAI_RESPONSES
from agentspec.proxy.responses.stored import Keeper, StoredRoute
from agentspec.proxy.routes.embeddings import EmbeddingsEndpoint
from agentspec.proxy.routes.pages import Pages
from agentspec.proxy.routes.tokenization import CountTokensEndpoint, TokenizationEndpoint
from agentspec.proxy.ui.routes import page_files, page_routes
from agentspec.proxy.ui.runs import Runs
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings

QUEUED = 64  # requests that may wait for a local engine, besides those that it runs
_BELOW_V1 = ("chat/completions", "completions", "responses", "messages", "embeddings", "models")
APIS = (CHATS, TEXTS, ANTHROPIC, OPENAI_RESPONSES)
"""Where else another API needs a line: docs/structure.md, "Where to find"."""


def create_app(runtime: Runtime, settings: Settings | None = None) -> GatewayMiddleware:
    """The gateway as an ASGI application, to be run with its lifespan.

    The lifespan starts the runtime in a thread; until that is done, generation requests get 503. The end of the
    lifespan closes the runtime. Raises `ConfigurationError` for an API key that cannot be read.
    """
    settings = settings or runtime.settings
    server = settings.server
    slots = Slots(server, _most_at_once(settings))
    budget = BodyBudget(server.max_body_memory, shared=bool(server.api_keys))
    deadlines: WeakSet[Deadline] = WeakSet()
    pages = Pages(runtime, slots)
    services = Services(
        runtime,
        server,
        slots,
        budget,
        deadlines,
        Metering(server) if server.api_keys else None,
        Keeper(runtime, server),
        several_tenants=len(server.tenant_names) > 1,
        runs=Runs(runtime) if settings.cache.keeps_runs else None,
    )
    routes = [*_generating(services), *_describing(pages)]
    if server.ui:
        routes += page_routes(services, pages)
    runtime.limit_upstreams(server.max_output_tokens)
    loading = Loading(runtime, pages.history.run if server.ui else None)
    if services.runs is not None:
        loading.at_end = services.runs.close
    router = Router(routes, redirect_slashes=False, default=_unknown, lifespan=lambda _: loading.lifespan())
    return GatewayMiddleware(
        routes=router,
        authenticator=Authenticator(server.api_keys),
        hosts=HostCheck(server),
        slots=slots,
        deadlines=deadlines,
        metrics=pages.registry,
        steps=pages.steps,
        loading=loading,
        budget=budget,
        public=frozenset(page_files()) if server.ui else frozenset(),
    )


def _most_at_once(settings: Settings) -> int:
    """How many requests run at once: where all models are local, no more than their engines take."""
    takes = [one.max_active + QUEUED for one in settings.backends.values() if isinstance(one, TorchSettings)]
    most = settings.server.max_concurrent
    return min(most, sum(takes)) if len(takes) == len(settings.backends) and takes else most


def _generating(services: Services) -> Iterator[RecordedRoute]:
    endpoints: list[GatewayEndpoint] = [GenerationEndpoint(api.path, services, api) for api in APIS]
    endpoints += [EmbeddingsEndpoint(EMBEDDINGS, services), CountTokensEndpoint(COUNT_TOKENS, services, ANTHROPIC, {})]
    counted = {"object": "response.input_tokens"}
    endpoints.append(CountTokensEndpoint(INPUT_TOKENS, services, OPENAI_RESPONSES, counted))
    endpoints.append(GenerationEndpoint(COMPACT, services, COMPACTION))
    endpoints += [TokenizationEndpoint(path, services) for path in (TOKENIZE, DETOKENIZE)]
    for one in endpoints:
        yield RecordedRoute(f"{one.root}{one.path}", one, "POST", "uses_models")
    yield RecordedRoute(f"/v1{RESPONSES}/{{id}}", StoredRoute(services), ("GET", "DELETE"), "uses_models")


def _describing(pages: Pages) -> Iterator[RecordedRoute]:
    for path, handler in pages.routes().items():
        yield RecordedRoute(path, handler, "GET")
    for path, page in {"/metrics": pages.metrics, "/fleet": pages.fleet}.items():
        yield RecordedRoute(path, page, "GET", "reads_metrics")


class Loading:
    """Starts a runtime in a thread for the lifespan of the application. `error` is the exception of a failed start.
    Meanwhile `watch` runs, if it is given.

    Loading cannot be interrupted. If the process ends with the application, call `abort()` before: the lifespan then
    does not wait for a model that is still loading, and sets `left_behind`, since the loading thread still runs.
    `when_ready` is called on the loop once everything is loaded.
    """

    def __init__(self, runtime: Runtime, watch: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        self._runtime, self._watch = runtime, watch
        self._aborted = False
        self.error: Exception | None = None
        self.left_behind = False
        self.seconds: float | None = None  # that loading took, once it is done
        self.when_ready: Callable[[], None] = lambda: None
        self.at_end: Callable[[], None] = lambda: None

    @property
    def models(self) -> list[str]:
        return self._runtime.models()

    @property
    def failure(self) -> Exception | None:
        """Why the process must be started again: the error of a failed start, or of a backend that failed for good."""
        return self.error or self._runtime.failure

    def abort(self) -> None:
        self._aborted = True

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Begin to load. At the end, call `at_end` and close the runtime, which flushes the cache."""
        task = asyncio.create_task(self._load())
        watching = asyncio.create_task(self._watch()) if self._watch else None
        try:
            yield
        finally:
            if watching:
                watching.cancel()
            self.at_end()
            if self._aborted and not task.done():
                self.left_behind = True
                task.cancel()
                logger.info("stopped while loading")
            else:
                await self._runtime.aclose()
            with suppress(asyncio.CancelledError):
                await task

    async def _load(self) -> None:
        started = perf_counter()
        logger.info("loading", models=self.models)
        try:
            await anyio.to_thread.run_sync(self._runtime.start, abandon_on_cancel=True)
            if self._runtime.fleet is not None:
                await self._runtime.fleet.begin()
            self.when_ready()
            self.seconds = perf_counter() - started
        except ShuttingDownError:
            logger.info("stopped while loading")
        except Exception as error:
            self.error = error
            logger.error("loading failed", exception=type(error).__name__)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
        return
    path = shown_name(scope["path"])
    raise HTTPException(404, f"{path!r}{_hint(scope['path'])}")


def _hint(path: str) -> str:
    """What to set, if a client adds other paths to its base URL than its user thought."""
    if path.startswith("/v1/v1/"):
        return "; this client adds /v1 to its base URL itself: leave /v1 out of it"
    below = path.startswith(tuple(f"/{name}" for name in _BELOW_V1))
    return "; the client's base URL has to end in /v1" if below else ""
