"""Sends an answer of the Responses API: as typed events, or whole."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.types import Send

from agentspec.errors import InvalidRequestError, OverloadedError
from agentspec.protocol.openai_responses.events import EventWriter
from agentspec.protocol.responses import encode, obfuscated
from agentspec.protocol.sse import named_event
from agentspec.protocol.upstream_errors import without_account
from agentspec.proxy.body.budget import BodyAccount
from agentspec.proxy.errors import error_response
from agentspec.proxy.request_record import RequestRecord
from agentspec.proxy.streaming.sending import EVENT_STREAM, json_response, note, record_failure, respond
from agentspec.types import Delta

Keep = Callable[[EventWriter], Awaitable[None]]
"""Called with a finished answer, before its client is told that it is."""


async def send_whole(
    deltas: AsyncGenerator[Delta],
    writer: EventWriter,
    record: RequestRecord,
    send: Send,
    keep: Keep,
    account: BodyAccount,
) -> None:
    """Answer with one response object."""
    async with aclosing(deltas):
        async for delta in deltas:
            note(record, delta)
            for _ in writer.write(delta):
                pass
    for _ in writer.close():
        pass
    await keep(writer)
    await respond(send, await account.run(account.answer, json_response, writer.response))


async def send_events(
    deltas: AsyncGenerator[Delta],
    writer: EventWriter,
    record: RequestRecord,
    send: Send,
    keep: Keep,
    *,
    obfuscate: bool = False,
) -> None:
    """Answer with typed events, filled up to equal sizes if `obfuscate`.

    An error before the first delta is raised and gets its own HTTP status; a later one ends with `response.failed`.
    """
    encoded = obfuscated if obfuscate else encode

    async def out(one: dict[str, Any]) -> None:
        body = named_event(one["type"], encoded(one))
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async with aclosing(deltas):
        first: Delta | None = await anext(deltas, Delta(finish_reason="stop"))
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        for one in writer.begin():
            await out(one)
        try:
            while first is not None:
                note(record, first)
                for one in writer.write(first):
                    await out(one)
                first = await anext(deltas, None)
            for one in writer.close():
                await out(one)
            await keep(writer)
            await out(writer.last())
        except Exception as error:
            record_failure(record, error)
            await out(writer.fail(*failure(error, record.request_id)))
    await send({"type": "http.response.body", "body": b""})


def failure(error: Exception, request_id: str) -> tuple[str, str]:
    """OpenAI's code for an error inside a response, and what the client is told."""
    code = "server_error"
    if isinstance(error, OverloadedError):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequestError):
        code = "invalid_prompt"
    body = json.loads(without_account(error_response(error, request_id).body))
    return code, str(body["error"]["message"])
