"""Around every route: the request id, the key check, the error handler, one log line and the counters."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from agentspec.proxy.auth import Keys, request_id
from agentspec.proxy.concurrency_limiter import Gate
from agentspec.proxy.errors import failure, log_unexpected, outcome
from agentspec.proxy.loading import Loading
from agentspec.proxy.logs import logger
from agentspec.proxy.request_record import Exchange
from agentspec.telemetry.metrics import Metrics

OPEN_ROUTES = ("/health",)


@dataclass(slots=True)
class Door:
    """The gateway as an ASGI application. `gate.close()` begins a drain; `loading` tells how the start goes."""

    routes: Router
    keys: Keys
    gate: Gate
    metrics: Metrics
    loading: Loading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.routes(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = Exchange(request_id(headers), scope["method"])
        exchange.attach(scope)
        scope["app"], scope["agentspec.settings.api_keys"] = self, bool(self.keys)
        send = exchange.sending(send)
        self.metrics.in_flight.inc()
        try:
            if scope["path"] not in OPEN_ROUTES:
                exchange.tenant = self.keys.tenant(headers)
            await self.routes(scope, receive, send)
        except ClientDisconnect:
            exchange.outcome = "cancelled"
        except asyncio.CancelledError:
            exchange.outcome = "cancelled"
            raise
        except Exception as error:
            await _answer(error, exchange, send)
        finally:
            self.metrics.in_flight.dec()
            self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        metrics = self.metrics
        metrics.request(exchange.route, exchange.model, exchange.outcome, exchange.seconds)
        if exchange.first_token is not None:
            metrics.first_token(exchange.model, exchange.first_token)
        if (usage := exchange.usage) is not None:
            metrics.tokens(exchange.model, prompt=usage.prompt_tokens, completion=usage.completion_tokens)
        if (done := exchange.speculation) is not None:
            metrics.speculation(exchange.model, drafted=done.drafted, accepted=done.accepted, steps=done.steps)
        logger.log(_level(exchange), "request", **_log_fields(exchange))


async def _answer(error: Exception, exchange: Exchange, send: Send) -> None:
    """Say what went wrong, if there is still room to: once the answer has begun the connection can only be cut."""
    failed = failure(error, exchange.request_id)
    exchange.outcome, exchange.error = outcome(error), failed.code
    log_unexpected(error, exchange.request_id)
    if exchange.body_begun:
        return
    headers = {"content-type": "application/json", "content-length": str(len(failed.body)), **failed.headers}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": failed.status, "headers": raw})
    await send({"type": "http.response.body", "body": failed.body})


def _level(exchange: Exchange) -> int:
    if exchange.route in ("/health", "/ready", "/metrics"):
        return logging.DEBUG
    return logging.WARNING if exchange.outcome == "server_error" else logging.INFO


def _log_fields(exchange: Exchange) -> dict[str, Any]:
    usage = exchange.usage
    fields = {
        "request_id": exchange.request_id,
        "method": exchange.method,
        "route": exchange.route,
        "model": exchange.model,
        "tenant": exchange.tenant,
        "status": exchange.status,
        "outcome": exchange.outcome,
        "error": exchange.error,
        "stream": exchange.stream,
        "seconds": round(exchange.seconds, 4),
        "first_token_seconds": None if exchange.first_token is None else round(exchange.first_token, 4),
        "prompt_tokens": usage and usage.prompt_tokens,
        "completion_tokens": usage and usage.completion_tokens,
    }
    return {name: value for name, value in fields.items() if value is not None}
