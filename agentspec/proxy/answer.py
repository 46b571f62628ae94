"""The answer to one request: sent, counted, charged and logged here, however it is made."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from starlette.types import Message, Scope, Send

from agentspec.backends.http import MEMBER_HEADER
from agentspec.errors import OverloadedError, UpstreamError
from agentspec.protocol.errors import anthropic_error
from agentspec.protocol.speculation import StepSpeculation
from agentspec.proxy.auth import Identity
from agentspec.proxy.errors import error_response, log_unexpected, outcome
from agentspec.proxy.logs import logger
from agentspec.step.statistics import Key, StepStatistics
from agentspec.telemetry.gen_ai import CAPTURED_BYTES, end_request
from agentspec.telemetry.metrics import Metrics
from agentspec.types import Delta, Speculation, Usage

if TYPE_CHECKING:
    from agentspec.backends.pool.pool import Attempt
    from agentspec.telemetry.otel import Span

_KEY = "agentspec.answer"
BYTES_PER_TOKEN = 4
PIECE = 31 << 10  # so that a connection's full buffer, a piece and its frame stay within 64 KiB
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_MESSAGES = "/v1/messages/"
_LIMITS = (b"x-ratelimit-", b"anthropic-ratelimit-")
_QUIET = ("/health", "/ready", "/metrics", "/ui")


@dataclass(slots=True)
class RequestAnswer:
    """One answer, from the arrival of its request on. `model` is None, "other" or a configured name: no client text is
    logged.

    `key` is the identity of the request's key, None before the check; `has_gateway_key`: the gateway has keys, so that
    a client's Authorization header is for it. `anthropic`: the route is of Anthropic's API, and so are its errors.
    `response_headers` are added by the backend, `limit_headers` say where the key stands. `attempt` is the server of a
    pool that answers or failed last; only operators see its name. `queued` are the seconds until it got a slot,
    `rejected` the limit that refused it, or "overloaded". `step` are the workflow and step that a request names which
    generates, `early_tools` what its agent counted. `correct_charge` is called once with the finished answer; `watch`
    sees each message before it is sent. `span` is that of the request, `sent` its answer's body for a span with texts.
    """

    request_id: str
    method: str
    send_on: Send
    route: str = "unknown"
    has_gateway_key: bool = False
    anthropic: bool = False
    large_body: bool = False  # of the request: 100 kB or more, or of unknown length
    key: Identity | None = None
    model: str | None = None
    step: Key | None = None
    early_tools: int = 0
    status: int = 0
    outcome: str = "ok"
    error: str | None = None
    rejected: str | None = None
    queued: float | None = None
    stream: bool = False
    usage: Usage | None = None
    speculation: Speculation | None = None
    response_headers: Mapping[str, str] = field(default_factory=dict)
    limit_headers: tuple[tuple[bytes, bytes], ...] = ()
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    arrived: int = 0  # tokens, about
    body_begun: bool = False
    body_ended: bool = False
    release_slot: Callable[[], None] | None = None
    attempt: Attempt | None = None
    correct_charge: Callable[[RequestAnswer], None] | None = None
    watch: Callable[[Message], Awaitable[None]] | None = None
    span: Span | None = None
    sent: bytearray | None = None

    @classmethod
    def of(cls, scope: Scope) -> RequestAnswer:
        return cast(RequestAnswer, scope[_KEY])

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self
        self.anthropic = f"{scope['path']}/".startswith(_MESSAGES)
        headers = dict(scope["headers"])
        self.large_body = b"transfer-encoding" in headers or len(headers.get(b"content-length", b"")) > 5

    @property
    def tenant(self) -> str:
        return self.key.tenant if self.key else ""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def answered(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Report the head of an upstream's answer, or an error with its `body`, to the pool that chose the server.

        Raises `UpstreamStatusError` if another server is asked instead.
        """
        if self.attempt is not None:
            self.attempt.answered(status, headers, body)

    def arrive(self, tokens: int = 1) -> None:
        """Count tokens that came, of a stream about its events, and record the time of the first."""
        self.arrived += tokens
        if self.first_token is None:
            self.first_token = self.seconds

    def count(self, delta: Delta) -> None:
        self.usage = delta.usage or self.usage
        self.speculation = delta.speculation or self.speculation

    def add(self, delta: Delta) -> None:
        if delta.text or delta.token_ids or delta.extra:
            self.arrive(len(delta.token_ids) or 1)
        self.count(delta)

    def fail(self, outcome: str, error: str | None) -> None:
        self.outcome, self.error = outcome, error

    def interrupt(self, error: Exception) -> None:
        """Record that `error` broke the answer off after it had begun."""
        self.fail(outcome(error), error_response(error).code)
        log_unexpected(error, self.request_id)
        if isinstance(error, UpstreamError) and self.attempt is not None:
            self.attempt.broke()

    def report(self, error: Any) -> None:
        """Count an answer of status 200 that reports `error` as the failure that it is."""
        if error:
            code = error.get("code") if isinstance(error, Mapping) else None
            refused = isinstance(code, int) and 400 <= code < 500
            self.fail("client_error" if refused else "server_error", "upstream_error")
            if not refused and self.attempt is not None:
                self.attempt.broke()

    async def refuse(self, error: Exception) -> None:
        """Answer with the error, unless the response has begun: then the connection can only be closed.

        The caller sends the end of the body.
        """
        failed = error_response(error, self.request_id)
        self.fail(outcome(error), failed.code)
        if isinstance(error, OverloadedError):
            self.rejected = getattr(error, "limit", failed.code)
        log_unexpected(error, self.request_id)
        if self.body_begun:
            return
        body = anthropic_error(failed.body, failed.status, self.request_id) if self.anthropic else failed.body
        headers = {"content-type": "application/json", "content-length": str(len(body)), **failed.headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": failed.status, "headers": raw})
        await self.send(piece(body))

    async def send(self, message: Message) -> None:
        """Send an ASGI message: with the answer's headers, and a large body piece by piece, each once the client took
        enough of those before.
        """
        if self.watch is not None:
            await self.watch(message)
        if message["type"] == "http.response.start":
            self.status, self.body_begun = message["status"], True
            given = message.get("headers", ())
            if self.limit_headers:  # an upstream's limits are not the key's
                given = [pair for pair in given if not pair[0].startswith(_LIMITS)]
            message["headers"] = [*given, *self._headers()]
            if not self.stream and self.release_slot is not None:
                self.release_slot()  # a client that reads a whole answer slowly takes no slot from others
        body, more = message.get("body", b""), message.get("more_body", False)
        if self.sent is not None and len(self.sent) + len(body) <= CAPTURED_BYTES:
            self.sent += body
        while len(body) > PIECE:
            await self.send_on(piece(body[:PIECE]))
            message, body = {**message, "body": body[PIECE:]}, body[PIECE:]
        await self.send_on(message)
        self.body_ended = message["type"] == "http.response.body" and not more

    def _headers(self) -> Iterator[tuple[bytes, bytes]]:
        yield b"x-request-id", self.request_id.encode()
        if self.anthropic:
            yield b"request-id", self.request_id.encode()
        if self.large_body and (self.status >= 400 or self.method != "POST"):
            yield b"connection", b"close"  # the server would go on to read the body, however long it is
        yield from self.limit_headers
        for name, value in self.response_headers.items():
            yield name.encode(), value.encode()
        if self.attempt is not None and self.key is not None and self.key.reads_metrics:
            yield MEMBER_HEADER.encode(), self.attempt.member.encode("ascii", "replace")

    def finish(self, metrics: Metrics, steps: MutableMapping[str, StepStatistics]) -> None:
        """Charge, count, trace and log the answer, once it is over in whatever way; `steps` counts it by tenant."""
        if self.correct_charge is not None:
            self.correct_charge(self)
        metrics.request(self.route, self.model, self.outcome, self.seconds)
        if self.error is not None:
            metrics.error(self.model, self.status, self.error)
        if self.rejected is not None:
            metrics.rejected(self.tenant, self.rejected)
        metrics.spent(self.model, queue_time=self.queued, time_to_first_token=self.first_token)
        if (usage := self.usage) is not None:
            if self.first_token is not None and self.error is None and usage.completion_tokens > 1:
                each = (self.seconds - self.first_token) / (usage.completion_tokens - 1)
                metrics.spent(self.model, time_per_output_token=each)
            metrics.tokens(self.model, prompt=usage.prompt_tokens, completion=usage.completion_tokens)
            if self.has_gateway_key:
                metrics.tenant_tokens(self.tenant, prompt=usage.prompt_tokens, completion=usage.completion_tokens)
        if (done := self.speculation) is not None:
            failed = done.degraded if isinstance(done, StepSpeculation) else ()
            metrics.speculation(self.model, done, failed)
        if self.step is not None:
            more = {"failed_calls": self.outcome != "ok", "early_tools": self.early_tools}
            steps.setdefault(self.tenant, StepStatistics()).add_call(self.step, usage, done, self.seconds, **more)
        if self.span is not None:
            end_request(self.span, self)
        level = logging.WARNING if self.outcome == "server_error" else logging.INFO
        logger.log(logging.DEBUG if self.route.startswith(_QUIET) else level, "request", **self._log_fields())

    def _log_fields(self) -> dict[str, Any]:
        usage = self.usage
        fields = {
            "request_id": self.request_id,
            "method": self.method,
            "route": self.route,
            "model": self.model,
            "tenant": self.tenant or None,
            "member": self.attempt and self.attempt.member,
            "status": self.status,
            "outcome": self.outcome,
            "error": self.error,
            "stream": self.stream,
            "seconds": round(self.seconds, 4),
            "first_token_seconds": None if self.first_token is None else round(self.first_token, 4),
            "prompt_tokens": usage and usage.prompt_tokens,
            "completion_tokens": usage and usage.completion_tokens,
        }
        return {name: value for name, value in fields.items() if value is not None}


def piece(data: bytes) -> Message:
    """The message for a part of a body that is not its last."""
    return {"type": "http.response.body", "body": data, "more_body": True}
