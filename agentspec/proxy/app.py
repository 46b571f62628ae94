"""The gateway as an ASGI application: its routes, its start and its end.

A path that is not listed here reaches no upstream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from starlette.exceptions import HTTPException
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
)
from agentspec.proxy.admission import Deadlines, Slots
from agentspec.proxy.auth import Authenticator, HostCheck
from agentspec.proxy.body.budget import BodyBudget
from agentspec.proxy.endpoint import GenerationEndpoint
from agentspec.proxy.loading import Loading
from agentspec.proxy.messages.endpoint import CountTokensEndpoint, MessagesEndpoint
from agentspec.proxy.metering import Metering
from agentspec.proxy.middleware import GatewayMiddleware, RecordedRoute
from agentspec.proxy.pages import Pages
from agentspec.proxy.responses.endpoint import ResponsesEndpoint
from agentspec.proxy.responses.stored import StoredRoute
from agentspec.proxy.routes.completions import CompletionsEndpoint
from agentspec.proxy.routes.embeddings import EmbeddingsEndpoint
from agentspec.proxy.routes.extra_routes import ExtraRoute, sole_upstream
from agentspec.proxy.routes.tokenization import TokenizationEndpoint
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings

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


def _generating(endpoints: Iterable[GenerationEndpoint]) -> Iterator[RecordedRoute]:
    for one in endpoints:
        yield RecordedRoute(f"{one.root}{one.path}", one, "POST", "uses_models")


def _describing(pages: Pages) -> Iterator[RecordedRoute]:
    for path, handler in pages.routes().items():
        yield RecordedRoute(path, handler, "GET")
    for path, page in {"/metrics": pages.metrics, "/fleet": pages.fleet}.items():
        yield RecordedRoute(path, page, "GET", "reads_metrics")


def _stored(responses: ResponsesEndpoint) -> Iterator[RecordedRoute]:
    """The routes that read and delete stored answers of the Responses API."""
    one = f"/v1{RESPONSES}/{{id}}"
    yield RecordedRoute(one, StoredRoute(responses, responses.keeper), ("GET", "DELETE"), "uses_models")


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
