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
from agentspec.protocol.responses import Accumulator, ResponseWriter, obfuscated
from agentspec.protocol.wire import DONE, encode, event, named_event
from agentspec.proxy.errors import anthropic_error_event, error_event, log_unexpected, outcome
from agentspec.proxy.forwarding import Arrival
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


async def send_json(deltas: AsyncGenerator[Delta], writer: ResponseWriter, arrival: Arrival) -> None:
    """Answer with one JSON object."""
    record, answer = RequestRecord.of(arrival.scope), Accumulator()
    async with aclosing(deltas), arrival.deadline.limit():
        async for delta in deltas:
            await arrival.account.grow(delta.size)
            note(record, delta)
            answer.add(delta)
    response = await arrival.account.run(arrival.account.answer, lambda: json_response(writer.body(answer)))
    await respond(arrival.send, response)


async def send_sse(
    deltas: AsyncGenerator[Delta],
    writer: ResponseWriter,
    arrival: Arrival,
    *,
    obfuscate: bool = False,
    framing: Framing = CHUNKS,
) -> None:
    """Answer with server-sent events, filled up to equal sizes if `obfuscate`.

    An error before the first delta is raised and gets its own HTTP status.
    """
    record, send = RequestRecord.of(arrival.scope), arrival.send

    async def send_chunks(delta: Delta) -> None:
        note(record, delta)
        for data in [framing.event(chunk, obfuscate=obfuscate) for chunk in writer.chunks(delta)]:
            await send_piece(send, data)

    async with aclosing(deltas):
        async with arrival.deadline.limit():
            first = await anext(deltas, Delta(finish_reason="stop"))
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        try:
            async with arrival.deadline.limit():
                await send_chunks(first)
                async for delta in deltas:
                    await send_chunks(delta)
        except Exception as error:
            record_failure(record, error)
            await send_piece(send, framing.error(error, record.request_id))
        await send_piece(send, framing.end)
    await send({"type": "http.response.body", "body": b""})


async def send_piece(send: Send, data: bytes) -> None:
    """Send a part of an answer that is not its last."""
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
