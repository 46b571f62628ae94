"""The record of one request and its outcome: filled in while the request runs, then logged and counted once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from starlette.types import Message, Scope, Send

from agentspec.backends.http import MEMBER_HEADER
from agentspec.proxy.admission import Slot
from agentspec.proxy.auth import Identity
from agentspec.types import Delta, Labels, Speculation, Usage

if TYPE_CHECKING:
    from agentspec.backends.pool.pool import Attempt

_KEY = "agentspec.request_record"
BYTES_PER_TOKEN = 4
PIECE = 31 << 10  # so that a connection's full buffer, a piece and its frame stay within 64 KiB
_MESSAGES = "/v1/messages/"
_LIMITS = (b"x-ratelimit-", b"anthropic-ratelimit-")


@dataclass(slots=True)
class RequestRecord:
    """One request and its outcome. `model` is None, "other" or a configured name: no client text is logged.

    `identity` is whose key the request has, None before the check. `has_gateway_key` tells that the Authorization
    header is meant for this gateway. `response_headers` are the headers that the backend adds to the response.
    `attempt` is the server of a pool that answers or failed last, whose name operators are told.
    `labels` are those of the request. `limit_headers` tell where its key stands. `anthropic`: the route is of
    Anthropic's API, and so are its errors.
    """

    request_id: str
    method: str
    route: str = "unknown"
    has_gateway_key: bool = False
    identity: Identity | None = None
    model: str | None = None
    status: int = 0
    outcome: str = "ok"
    error: str | None = None
    stream: bool = False
    usage: Usage | None = None
    speculation: Speculation | None = None
    response_headers: Mapping[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    arrived: int = 0
    body_begun: bool = False
    body_ended: bool = False
    anthropic: bool = False
    limit_headers: tuple[tuple[bytes, bytes], ...] = ()
    labels: Labels = field(default_factory=Labels)
    slot: Slot | None = None
    attempt: Attempt | None = None  # at one of several servers
    large_body: bool = False  # of the request: 100 kB or more, or of unknown length

    @classmethod
    def of(cls, scope: Scope) -> RequestRecord:
        return cast(RequestRecord, scope[_KEY])

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self
        self.anthropic = f"{scope['path']}/".startswith(_MESSAGES)
        headers = dict(scope["headers"])
        self.large_body = b"transfer-encoding" in headers or len(headers.get(b"content-length", b"")) > 5

    @property
    def tenant(self) -> str:
        """Whose request it is; empty before the check of its key."""
        return self.identity.tenant if self.identity else ""

    @property
    def failed(self) -> bool:
        """Whether the request had no answer, or a broken one; not if its client left."""
        return self.outcome not in ("ok", "cancelled")

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def answer_arrived(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Note the head of an upstream's answer, or an error with its `body`. Raises `UpstreamStatusError` if another
        server is asked instead.
        """
        if self.attempt is not None:
            self.attempt.answered(status, headers, body)

    def answer_broke(self) -> None:
        """Note that an upstream's answer broke off, or ended with an error of its server's."""
        if self.attempt is not None:
            self.attempt.broke()

    def whole_arrived(self, size: int) -> None:
        """Note a whole answer of so many bytes: they stand for its tokens where no usage is reported."""
        self.arrived = size // BYTES_PER_TOKEN

    def token_arrived(self, tokens: int = 1) -> None:
        """Record the time of the first token, and that so many came, about: of a stream its events."""
        self.arrived += tokens
        if self.first_token is None:
            self.first_token = self.seconds

    def read(self, delta: Delta) -> None:
        """Record the counts that a delta carries."""
        self.usage = delta.usage or self.usage
        self.speculation = delta.speculation or self.speculation

    def fail(self, outcome: str, error: str | None) -> None:
        self.outcome, self.error = outcome, error

    def sending(self, send: Send) -> Send:
        """Wrap `send` to note the status, to add the request id and the backend's headers to the response, and to write
        large bodies piece by piece, each once the client took enough of those before.
        """

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status, self.body_begun = message["status"], True
                message["headers"] = [*self._without_limits(message.get("headers", ())), *self._headers()]
                if not self.stream and self.slot is not None:
                    self.slot.release()  # a client that reads a whole answer slowly takes no slot from others
            if len(message.get("body", b"")) > PIECE:
                await _send_pieces(message, send)
            else:
                await send(message)
            self.body_ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        return watched

    def _without_limits(self, headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
        """An upstream's headers, without those on its limits where the key has limits here."""
        if not self.limit_headers:
            return headers
        return (pair for pair in headers if not pair[0].startswith(_LIMITS))

    def _headers(self) -> Iterator[tuple[bytes, bytes]]:
        yield b"x-request-id", self.request_id.encode()
        if self.anthropic:
            yield b"request-id", self.request_id.encode()
        if self.large_body and (
            self.status >= 400 or self.method != "POST"
        ):  # the server would go on to read it, however long it is
            yield b"connection", b"close"
        yield from self.limit_headers
        for name, value in self.response_headers.items():
            yield name.encode(), value.encode()
        if self.attempt is not None and self.identity is not None and self.identity.reads_metrics:
            yield MEMBER_HEADER.encode(), self.attempt.member.encode("ascii", "replace")


async def _send_pieces(message: Message, send: Send) -> None:
    body = message["body"]
    for start in range(0, len(body), PIECE):
        more = start + PIECE < len(body) or message.get("more_body", False)
        await send({**message, "body": body[start : start + PIECE], "more_body": more})
