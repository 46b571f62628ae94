"""Sends answers: as one JSON object, or as server-sent events in the form of each API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Send

from agentspec.errors import AgentSpecError, UpstreamError
from agentspec.protocol.deltas import size_of
from agentspec.protocol.responses import Accumulator, ResponseWriter, obfuscated
from agentspec.protocol.wire import DONE, encode, event, named_event
from agentspec.proxy.body.budget import BodyAccount
from agentspec.proxy.errors import anthropic_error_event, error_event, log_unexpected, outcome
from agentspec.proxy.request_record import RequestRecord
from agentspec.types import Delta


@dataclass(frozen=True, slots=True)
class Framing:
    """`named`: events have the chunk's `type` as their name. `error` makes the event of a failure, given the request's
    id; `end` is sent after everything.
    """

    named: bool = False
    error: Callable[[Exception, str], bytes] = error_event
    end: bytes = DONE

    def event(self, chunk: dict[str, Any], *, obfuscate: bool = False) -> bytes:
        """The event of one chunk, filled up to a common size if `obfuscate`."""
        data = obfuscated(chunk) if obfuscate else encode(chunk)
        return named_event(chunk["type"], data) if self.named else event(data)


CHUNKS = Framing()
"""OpenAI's chats and completions."""
MESSAGE_EVENTS = Framing(named=True, error=anthropic_error_event, end=b"")
"""Anthropic's messages."""


EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def collected(deltas: AsyncGenerator[Delta], account: BodyAccount) -> AsyncGenerator[Delta]:
    """The same deltas for who keeps them all: `account` has room for each before it comes, and waits for it.

    Raises `AnswerMemoryError`.
    """
    size = 0
    async with aclosing(deltas):
        async for delta in deltas:
            size += size_of(delta)
            await account.cover(size)
            yield delta


async def send_json(
    deltas: AsyncGenerator[Delta], writer: ResponseWriter, record: RequestRecord, send: Send, account: BodyAccount
) -> None:
    """Answer with one JSON object."""
    answer = Accumulator()
    async with aclosing(deltas):
        async for delta in deltas:
            note(record, delta)
            answer.add(delta)
    await respond(send, await account.run(account.answer, lambda: json_response(writer.body(answer))))


async def send_sse(
    deltas: AsyncGenerator[Delta],
    writer: ResponseWriter,
    record: RequestRecord,
    send: Send,
    *,
    obfuscate: bool = False,
    framing: Framing = CHUNKS,
) -> None:
    """Answer with server-sent events, filled up to equal sizes if `obfuscate`.

    An error before the first delta is raised and gets its own HTTP status.
    """
    async with aclosing(deltas):
        first = await anext(deltas, Delta(finish_reason="stop"))
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        try:
            await _send_chunks(first, writer, record, send, framing, obfuscate)
            async for delta in deltas:
                await _send_chunks(delta, writer, record, send, framing, obfuscate)
        except Exception as error:
            record_failure(record, error)
            await _send(send, framing.error(error, record.request_id))
        await _send(send, framing.end)
    await send({"type": "http.response.body", "body": b""})


async def _send_chunks(
    delta: Delta, writer: ResponseWriter, record: RequestRecord, send: Send, framing: Framing, obfuscate: bool
) -> None:
    note(record, delta)
    events = [framing.event(chunk, obfuscate=obfuscate) for chunk in writer.chunks(delta)]
    for data in events:
        await _send(send, data)


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def json_response(value: Any, status: int = 200) -> Response:
    """`value` as compact JSON. A thread may make it: orjson holds the interpreter's lock for a tenth of json's time."""
    try:
        content = orjson.dumps(value)
    except TypeError:  # half a surrogate pair, or an integer above 64 bits
        content = encode(value)
    return Response(content, status, media_type="application/json")


async def respond(send: Send, response: Response) -> None:
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


def note(record: RequestRecord, delta: Delta) -> None:
    if delta.text or delta.token_ids or delta.extra:
        record.token_arrived(len(delta.token_ids) or 1)
    record.read(delta)


def record_failure(record: RequestRecord, error: Exception) -> None:
    record.fail(outcome(error), error.code if isinstance(error, AgentSpecError) else type(error).__name__)
    log_unexpected(error, record.request_id)
    if isinstance(error, UpstreamError):
        record.answer_broke()
