"""Passes requests for local models on to the process of the local engine, and its answers back byte for byte."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from starlette.types import Scope, Send

from agentspec.errors import AgentSpecError, EngineRestartingError, NotReadyError, UpstreamError
from agentspec.protocol.sse import EventSplitter
from agentspec.protocol.usage import speculation_object, usage_object
from agentspec.proxy.admission.limits import Deadline
from agentspec.proxy.errors import outcome
from agentspec.proxy.forwarding.inspection import read_counts
from agentspec.proxy.request_record import RequestRecord
from agentspec.proxy.streaming.framing import CHUNKS, Framing

if TYPE_CHECKING:
    from agentspec.backends.http.connections import RawAnswer

TENANT_HEADER = b"x-agentspec-relayed-tenant"
"""Whose request it is, percent-encoded. Believed on the engine's own socket, and never passed on from a client."""
MARK = b"\0"
"""Stands behind an answer and before its record; neither JSON nor our events hold such a byte."""
_KEPT_BACK = frozenset(  # keys, and what belongs to the client's connection
    b"authorization x-api-key cookie host connection keep-alive content-length transfer-encoding te trailer upgrade"
    b" expect accept-encoding x-request-id".split()
)
_OUR_OWN = (b"x-request-id", b"request-id", b"connection", b"transfer-encoding", b"date")


class Follows(Protocol):
    """Follows a stream of whole events, to end it in its own form if it is cut."""

    def read(self, events: bytes) -> None: ...

    def failure(self, error: Exception, request_id: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class FramedStream:
    """A stream whose end does not depend on what came before."""

    framing: Framing = CHUNKS

    def read(self, events: bytes) -> None:
        """Nothing to note."""

    def failure(self, error: Exception, request_id: str) -> bytes:
        """The event that tells the error, and what ends the stream."""
        return self.framing.error(error, request_id) + self.framing.end


class EngineLink:
    """The way from one process of the gateway to the engine's, whose socket is at `path`.

    `ready`: whether the engine has loaded its models and accepts requests.
    """

    def __init__(self, path: Path) -> None:
        from agentspec.backends.http import LocalServer

        self.ready = False
        self._server = LocalServer(path)

    async def relay(
        self, scope: Scope, send: Send, body: bytes, deadline: Deadline, follower: Follows | None = None
    ) -> None:
        """Let the engine answer a request, and note in its record what the engine noted. `follower` follows a stream.

        Raises `NotReadyError`, and `EngineRestartingError` where the engine ends before it has begun to answer; an
        answer that it has begun ends with an error.
        """
        record = RequestRecord.of(scope)
        if not self.ready:
            raise NotReadyError("the models are still loading; try again soon")
        sent, headers = record.seconds, list(_request_headers(scope, record))
        try:
            async with deadline.limit():
                asked = self._server.post(scope["path"], headers, body)
                response = await asked.__aenter__()
        except UpstreamError:
            raise _lost() from None
        try:
            await _pass_back(response, record, sent, send, deadline, follower or FramedStream())
        finally:
            await asked.__aexit__(None, None, None)


async def _pass_back(
    response: RawAnswer, record: RequestRecord, sent: float, send: Send, deadline: Deadline, follower: Follows
) -> None:
    headers = [pair for pair in response.headers if pair[0] not in _OUR_OWN]
    answer = _Answer(response)
    record.stream = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
    if record.stream:
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await _stream(answer, record, sent, send, deadline, follower)
        return
    try:
        async with deadline.limit():
            content = b"".join([piece async for piece in answer.pieces()])
    except UpstreamError:
        raise _lost() from None
    answer.note(record, sent)
    length = (b"content-length", b"%d" % len(content))
    await send({"type": "http.response.start", "status": response.status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": content})


async def _stream(
    answer: _Answer, record: RequestRecord, sent: float, send: Send, deadline: Deadline, follower: Follows
) -> None:
    """Send whole events. A stream that the engine does not complete ends with an error event."""
    splitter, rest = EventSplitter(), b""
    try:
        async with deadline.limit(), aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                if events := splitter.feed(piece):
                    follower.read(events)
                    record.token_arrived(events.count(b"data:"))
                    await send({"type": "http.response.body", "body": events, "more_body": True})
        answer.note(record, sent)
    except AgentSpecError as error:
        told = _lost() if isinstance(error, UpstreamError) else error
        record.fail(outcome(told), told.code)
        rest = splitter.separator() + follower.failure(told, record.request_id)
    await send({"type": "http.response.body", "body": rest})


class _Answer:
    """An answer of the engine's, and behind it what it noted in its record."""

    def __init__(self, response: RawAnswer) -> None:
        self._response = response
        self._told: bytearray | None = None

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The answer without the record. Raises `UpstreamError` if it is cut."""
        from agentspec.backends.http import pieces_of

        async with aclosing(pieces_of(self._response)) as pieces:
            async for piece in pieces:
                if self._told is not None:
                    self._told += piece
                elif MARK in piece:
                    piece, _, told = piece.partition(MARK)
                    self._told = bytearray(told)
                    yield piece
                else:
                    yield piece
        if self._told is None:
            raise UpstreamError("the engine's answer is cut")

    def note(self, record: RequestRecord, sent: float) -> None:
        """Take over what the engine noted, whose clock began `sent` seconds after the request's."""
        told = json.loads(self._told or b"{}")
        record.fail(told["outcome"], told["error"])
        if told["first_token"] is not None:
            record.first_token = sent + told["first_token"]
        record.read(read_counts(told))


def noted(record: RequestRecord) -> bytes:
    """What stands behind an answer of the engine: the mark and what its record holds."""
    told: dict[str, Any] = {
        "outcome": record.outcome,
        "error": record.error,
        "first_token": record.first_token,
        "usage": record.usage and usage_object(record.usage),
        "speculation": record.speculation and speculation_object(record.speculation),
    }
    return MARK + json.dumps(told).encode()


def _request_headers(scope: Scope, record: RequestRecord) -> Iterator[tuple[bytes, bytes]]:
    """The client's headers, which tell who is asking and for what, and whose request it is."""
    for name, value in scope["headers"]:
        if name not in _KEPT_BACK and not name.startswith((TENANT_HEADER, b"proxy-")):
            yield name, value
    yield b"x-request-id", record.request_id.encode()
    yield TENANT_HEADER, quote(record.tenant, safe="").encode()


def _lost() -> EngineRestartingError:
    return EngineRestartingError("the local engine ended during this request and starts again; try again soon")
