"""Serves a knowledge base over HTTP; `reasoning/retrieval/knowledge/remote.py` is the client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentspec.errors import AgentSpecError, InvalidRequestError, RequestTooLargeError
from agentspec.proxy import logs
from agentspec.proxy.body.budget import BodyAccount, BodyBudget
from agentspec.proxy.body.json_object import parse_object
from agentspec.proxy.hosts import HostCheck, is_unprotected
from agentspec.proxy.serving.http_server import HttpServer
from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase, Query
from agentspec.reasoning.retrieval.knowledge.dense import DenseMetric, Encoder
from agentspec.reasoning.retrieval.knowledge.wire import found_json, parse_search
from agentspec.settings.server import ServerSettings

MAX_BODY_BYTES = 8 << 20
MAX_BODY_MEMORY = 256 << 20  # of all searches at once
PARSING_THREADS = 2
GRACE_SECONDS = 10


def create_service(base: KnowledgeBase) -> Starlette:
    """An ASGI application that answers `POST /search` and `GET /health`, and closes `base` when its lifespan ends."""

    budget = BodyBudget(MAX_BODY_MEMORY, PARSING_THREADS, shared=False)

    async def search(request: Request) -> Response:
        with budget.account("") as account:
            return await answer(*await _read_search(request, account))

    async def answer(queries: list[Query], count: int, fingerprint: str | None) -> Response:
        encoder = base.metric.encoder if isinstance(base.metric, DenseMetric) else None
        own = None if encoder is None else encoder.fingerprint
        encoded = [
            query if _usable(query, fingerprint, encoder) else await base.metric.encode(query.text) for query in queries
        ]
        return JSONResponse(found_json(await base.search(encoded, count), own))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await base.aclose()

    routes = [Route("/search", search, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={AgentSpecError: _failed})


def serve(base: KnowledgeBase, host: str, port: int, allowed_hosts: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or SIGINT; running searches then have ten seconds.

    `allowed_hosts` are names that clients may send as Host besides `host` and loopback. Raises `ConfigurationError` if
    it cannot listen.
    """
    logs.configure("INFO")
    settings = ServerSettings(host=host, port=port, allowed_hosts=tuple(allowed_hosts))
    if is_unprotected(settings):
        logs.logger.warning("everybody who reaches this address can read the corpus", host=host)
    HttpServer(_checked(create_service(base), HostCheck(settings)), settings, grace=GRACE_SECONDS).run()


def _checked(app: ASGIApp, hosts: HostCheck) -> ASGIApp:
    """`app` for requests that are meant for this server."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                hosts.check(scope, any_host=scope["path"] == "/health")
            except AgentSpecError as error:
                await JSONResponse(error.body(), error.status)(scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


async def _read_search(request: Request, account: BodyAccount) -> tuple[list[Query], int, str | None]:
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > MAX_BODY_BYTES:
            raise RequestTooLargeError(f"a search may have {MAX_BODY_BYTES} bytes")
        account(len(chunk))
        body += chunk
    try:
        return parse_search(await account.run(len(body), parse_object, bytes(body)))
    except (ValueError, InvalidRequestError) as error:
        raise InvalidRequestError(f"not a search: {error}") from None


def _usable(query: Query, fingerprint: str | None, encoder: Encoder | None) -> bool:
    """Whether the client's vector comes from the encoder that the knowledge base itself uses."""
    if encoder is None or fingerprint != encoder.fingerprint:
        return False
    return isinstance(query.features, np.ndarray) and query.features.shape == (encoder.dimensions,)


async def _failed(request: Request, error: Any) -> Response:
    return JSONResponse(error.body(), error.status, {"retry-after": "1"} if error.status == 429 else None)
