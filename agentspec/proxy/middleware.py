"""What wraps every request: its answer's record, the checks of Host and key, and the answer to an error."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from agentspec.errors import PermissionDeniedError, RequestTooLargeError
from agentspec.proxy.admission import Deadline, Slots
from agentspec.proxy.answer import RequestAnswer
from agentspec.proxy.auth import Authenticator, HostCheck
from agentspec.proxy.body.budget import BodyBudget
from agentspec.step.statistics import StepStatistics
from agentspec.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from agentspec.proxy.app import Loading

LINGER_SECONDS, LINGER_BYTES = 5.0, 32 << 20  # that a body is read on behind its refusal
OPEN_ROUTES = ("/health", "/ready")
"""Routes for probes of orchestrators, which send no key and call the gateway by any name."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RecordedRoute(Route):
    """A route for keys with a `permission`; it first records its path, so that failed requests have it too."""

    def __init__(self, path: str, handler: Any, methods: str | Sequence[str], permission: str = "") -> None:
        listed = [methods] if isinstance(methods, str) else methods
        super().__init__(path, handler, methods=listed, include_in_schema=False)
        self._permission = permission

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = RequestAnswer.of(scope)
        answer.route = self.path
        if self._permission and not getattr(answer.key, self._permission):
            wanted = "a tenant's" if self._permission == "uses_models" else "an operator's"
            raise PermissionDeniedError(f"this route needs {wanted} API key (role in server.api_keys)")
        await super().handle(scope, receive, send)


@dataclass(slots=True)
class GatewayMiddleware:
    """The gateway as an ASGI application. `slots.close()` begins a drain; `loading` is the state of the start."""

    routes: Router
    authenticator: Authenticator
    hosts: HostCheck
    slots: Slots
    deadlines: WeakSet[Deadline]
    metrics: Metrics
    steps: MutableMapping[str, StepStatistics]
    loading: Loading
    budget: BodyBudget
    public: frozenset[str] = frozenset()
    """Paths whose answers are the same for all, so that they need no key."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.routes(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = RequestAnswer(_request_id(headers), scope["method"], send, has_gateway_key=bool(self.authenticator))
        answer.attach(scope)
        scope["app"] = self
        with self.metrics.in_flight.track_inprogress():
            try:
                await self._handle(answer, headers, scope, receive)
            finally:
                answer.finish(self.metrics, self.steps)

    async def _handle(self, answer: RequestAnswer, headers: Headers, scope: Scope, receive: Receive) -> None:
        try:
            path = scope["path"]
            self.hosts.check(scope, any_host=path in OPEN_ROUTES)
            is_open = path in OPEN_ROUTES or path in self.public
            answer.key = (self.authenticator.find if is_open else self.authenticator.identify)(headers)
            await self.routes(scope, receive, answer.send)
        except ClientDisconnect:
            if not answer.body_ended:
                answer.outcome = "cancelled"
        except asyncio.CancelledError:
            answer.outcome = "cancelled"
            raise
        except Exception as error:
            begun = answer.body_begun
            await answer.refuse(error)
            if isinstance(error, RequestTooLargeError):
                await _read_on(receive)
            if not begun:
                await answer.send({"type": "http.response.body", "body": b""})


def _request_id(headers: Headers) -> str:
    """The client's `x-request-id` if it is short and of harmless characters, else a new id."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{os.urandom(16).hex()}"


async def _read_on(receive: Receive) -> None:
    """Drop the rest of a body for a while: a client that still sends it would find a reset in place of the answer."""
    left = LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0 and (message := await receive()).get("more_body"):
                left -= len(message["body"])
