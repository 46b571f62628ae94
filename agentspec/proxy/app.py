"""The gateway as an ASGI application: its routes, its start and end, and what wraps every request.

A path that is not listed here reaches no upstream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
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
)
from agentspec.backends.settings import TorchSettings
from agentspec.errors import (
    ConfigurationError,
    PermissionDeniedError,
    RequestTooLargeError,
    ShuttingDownError,
)
from agentspec.protocol.errors import anthropic_error
from agentspec.proxy.admission import Deadlines, Slots
from agentspec.proxy.auth import Authenticator, HostCheck, request_id
from agentspec.proxy.body.budget import BodyBudget
from agentspec.proxy.endpoint import GenerationEndpoint
from agentspec.proxy.errors import error_response, log_unexpected, outcome
from agentspec.proxy.logs import logger
from agentspec.proxy.messages.endpoint import CountTokensEndpoint, MessagesEndpoint
from agentspec.proxy.metering import Metering
from agentspec.proxy.pages import Pages
from agentspec.proxy.request_record import RequestRecord
from agentspec.proxy.responses.endpoint import ResponsesEndpoint
from agentspec.proxy.responses.stored import StoredRoute
from agentspec.proxy.routes.completions import CompletionsEndpoint
from agentspec.proxy.routes.embeddings import EmbeddingsEndpoint
from agentspec.proxy.routes.extra_routes import ExtraRoute, sole_upstream
from agentspec.proxy.routes.tokenization import TokenizationEndpoint
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.telemetry.metrics import Metrics
from agentspec.types import StepSpeculation

QUEUED = 64  # requests that may wait for a local engine, beside those that it runs
# What all endpoints have behind their path, in the order of `GenerationEndpoint`'s fields.
EndpointArguments = tuple[Runtime, ServerSettings, Slots, BodyBudget, Deadlines, Metering | None]


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
    metering = Metering(server, pages.registry, budget) if server.api_keys else None
    common: EndpointArguments = (runtime, server, limiter, budget, deadlines, metering)
    endpoints, responses = _endpoints(settings, common)
    routes = [*_generating(endpoints), *_describing(pages), *_stored(responses)]
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
    takes = [one.max_active + QUEUED for one in settings.backends.values() if isinstance(one, TorchSettings)]
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


def _describing(pages: Pages) -> Iterator[_RecordedRoute]:
    for path, handler in pages.routes().items():
        yield _RecordedRoute(path, handler, "GET")
    for path, page in {"/metrics": pages.metrics, "/fleet": pages.fleet}.items():
        yield _RecordedRoute(path, page, "GET", "reads_metrics")


def _stored(responses: ResponsesEndpoint) -> Iterator[_RecordedRoute]:
    """The routes that read and delete stored answers of the Responses API."""
    one = f"/v1{RESPONSES}/{{id}}"
    yield _RecordedRoute(one, StoredRoute(responses, responses.keeper), ("GET", "DELETE"), "uses_models")


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


class Loading:
    """Starts a runtime in a thread for the lifespan of the application. `error` is the exception of a failed start.

    Loading cannot be interrupted. If the process ends with the application, call `abort()` before: the lifespan then
    does not wait for a model that is still loading, and sets `left_behind`, since the loading thread still runs.
    `when_ready` is called on the loop once everything is loaded.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._aborted = False
        self.error: Exception | None = None
        self.left_behind = False
        self.when_ready: Callable[[], None] = lambda: None

    @property
    def failure(self) -> Exception | None:
        """Why the process must be started again: the error of a failed start, or of a backend that failed for good."""
        return self.error or self._runtime.failure

    def abort(self) -> None:
        self._aborted = True

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Begin to load. At the end, close the runtime, which flushes the cache."""
        task = asyncio.create_task(self._load())
        try:
            yield
        finally:
            if self._aborted and not task.done():
                self.left_behind = True
                task.cancel()
                logger.info("stopped while loading")
            else:
                await self._runtime.aclose()
            with suppress(asyncio.CancelledError):
                await task

    async def _load(self) -> None:
        try:
            await anyio.to_thread.run_sync(self._runtime.start, abandon_on_cancel=True)
            if self._runtime.fleet is not None:
                await self._runtime.fleet.begin()
            self.when_ready()
            logger.info("ready", models=self._runtime.models())
        except ShuttingDownError:
            logger.info("stopped while loading")
        except Exception as error:
            self.error = error
            logger.error("loading failed", exception=type(error).__name__)


LINGER_SECONDS, LINGER_BYTES = 5.0, 32 << 20  # that a body is read on behind its refusal
OPEN_ROUTES = ("/health", "/ready")
"""Routes for probes of orchestrators, which send no key and call the gateway by any name."""


@dataclass(slots=True)
class GatewayMiddleware:
    """The gateway as an ASGI application. `limiter.close()` begins a drain; `loading` tells how the start goes."""

    routes: Router
    authenticator: Authenticator
    hosts: HostCheck
    limiter: Slots
    deadlines: Deadlines
    metrics: Metrics
    loading: Loading
    budget: BodyBudget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.routes(scope, receive, send)
            return
        record = RequestRecord(request_id(Headers(scope=scope)), scope["method"])
        record.attach(scope)
        scope["app"] = self
        record.has_gateway_key = bool(self.authenticator)
        send = record.sending(send)
        with self.metrics.in_flight.track_inprogress():
            await self._handle(record, scope, receive, send)

    async def _handle(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            is_open = scope["path"] in OPEN_ROUTES
            self.hosts.check(scope, any_host=is_open)
            record.identity = (self.authenticator.find if is_open else self.authenticator.identify)(headers)
            await self.routes(scope, receive, send)
        except ClientDisconnect:
            record.outcome = "cancelled"
        except asyncio.CancelledError:
            record.outcome = "cancelled"
            raise
        except Exception as error:
            await _answer(error, record, receive, send)
        finally:
            self._finish(record)

    def _finish(self, record: RequestRecord) -> None:
        metrics = self.metrics
        metrics.request(record.route, record.model, record.outcome, record.seconds)
        if record.first_token is not None:
            metrics.first_token(record.model, record.first_token)
        if (usage := record.usage) is not None:
            metrics.tokens(record.model, prompt=usage.prompt_tokens, completion=usage.completion_tokens)
        if (done := record.speculation) is not None:
            failed = done.degraded if isinstance(done, StepSpeculation) else ()
            metrics.speculation(record.model, done, failed)
        logger.log(_level(record), "request", **_log_fields(record))


async def _answer(error: Exception, record: RequestRecord, receive: Receive, send: Send) -> None:
    """Answer with the error, unless the response has begun: then the connection can only be closed."""
    failed = error_response(error, record.request_id)
    record.fail(outcome(error), failed.code)
    log_unexpected(error, record.request_id)
    if record.body_begun:
        return
    body = anthropic_error(failed.body, failed.status, record.request_id) if record.anthropic else failed.body
    headers = {"content-type": "application/json", "content-length": str(len(body)), **failed.headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": failed.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if isinstance(error, RequestTooLargeError):
        await _read_on(receive)
    await send({"type": "http.response.body", "body": b""})


async def _read_on(receive: Receive) -> None:
    """Drop the rest of a body for a while: a client that still sends it would find a reset in place of the answer."""
    left = LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0 and (message := await receive()).get("more_body"):
                left -= len(message["body"])


def _level(record: RequestRecord) -> int:
    if record.route in ("/health", "/ready", "/metrics"):
        return logging.DEBUG
    return logging.WARNING if record.outcome == "server_error" else logging.INFO


def _log_fields(record: RequestRecord) -> dict[str, Any]:
    usage = record.usage
    fields = {
        "request_id": record.request_id,
        "method": record.method,
        "route": record.route,
        "model": record.model,
        "tenant": record.tenant or None,
        "member": record.attempt and record.attempt.member,
        "status": record.status,
        "outcome": record.outcome,
        "error": record.error,
        "stream": record.stream,
        "seconds": round(record.seconds, 4),
        "first_token_seconds": None if record.first_token is None else round(record.first_token, 4),
        "prompt_tokens": usage and usage.prompt_tokens,
        "completion_tokens": usage and usage.completion_tokens,
    }
    return {name: value for name, value in fields.items() if value is not None}
