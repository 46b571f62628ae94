"""What wraps every request: its record, the checks of Host and key, the answer to an error, and the line in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from agentspec.errors import PermissionDeniedError, RequestTooLargeError
from agentspec.protocol.errors import anthropic_error
from agentspec.protocol.speculation import StepSpeculation
from agentspec.proxy.admission import Deadlines, Slots
from agentspec.proxy.auth import Authenticator, HostCheck, request_id
from agentspec.proxy.body.budget import BodyBudget
from agentspec.proxy.errors import error_response, log_unexpected, outcome
from agentspec.proxy.loading import Loading
from agentspec.proxy.logs import logger
from agentspec.proxy.request_record import RequestRecord
from agentspec.telemetry.metrics import Metrics

LINGER_SECONDS, LINGER_BYTES = 5.0, 32 << 20  # that a body is read on behind its refusal
OPEN_ROUTES = ("/health", "/ready")
"""Routes for probes of orchestrators, which send no key and call the gateway by any name."""


class RecordedRoute(Route):
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
            if not record.body_ended:
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
