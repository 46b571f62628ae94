"""Forwards requests to upstream models, and sends the upstream's answers back byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import Scope, Send

from agentspec.backends.base import CHAT
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.errors import AgentSpecError, UpstreamError
from agentspec.protocol.errors import anthropic_error, error_object, without_account
from agentspec.protocol.headers import PREFIX, label_headers
from agentspec.protocol.wire import EventSplitter
from agentspec.proxy.admission.auth import Caller
from agentspec.proxy.admission.limits import Deadline
from agentspec.proxy.body.budget import INLINE_BYTES, BodyAccount
from agentspec.proxy.body.reading import set_values
from agentspec.proxy.errors import outcome, refused_key
from agentspec.proxy.forwarding.inspection import Inspector, read_answer
from agentspec.proxy.forwarding.policy import with_policy
from agentspec.proxy.request_record import RequestRecord

if TYPE_CHECKING:
    from agentspec.backends.http import UpstreamResponse


_KEYS = ("authorization", "x-api-key")
_NO_CONTENT = 204  # has no body and tells no length of one (RFC 9110, sections 8.6 and 15.3.5)


async def upstream_body(
    backend: OpenAIBackend, path: str, body: bytes, fields: Mapping[str, Any], caller: Caller, model: str
) -> bytes:
    """`body`, which holds `fields`, with the upstream's model name, and with what the backend tells about the caller.

    Every other byte is kept. Token ids are not requested on behalf of a client, which would otherwise get events and
    fields that it did not request.
    """
    return await with_fields(body, fields, await added_fields(backend, path, fields, caller, model))


async def added_fields(
    backend: OpenAIBackend, path: str, fields: Mapping[str, Any], caller: Caller, model: str
) -> dict[str, Any]:
    """What a body with `fields` gets on its way to the upstream: see `upstream_body`."""
    asked = await with_policy(backend, path, fields, caller)
    added = await backend.body_fields(path, caller.tenant, caller.labels, asked, caller.off)
    if path == CHAT and fields.get("store") and not caller.store:  # off holds wherever it stands
        added = {**added, "store": False}
    return added if model == fields["model"] else {**added, "model": model}


async def with_fields(body: bytes, fields: Mapping[str, Any], added: Mapping[str, Any]) -> bytes:
    """`body`, which holds `fields`, with the values `added`: without any, byte for byte as it is."""
    if not added:
        return body
    if len(body) <= INLINE_BYTES:
        return set_values(body, fields, added)
    return await asyncio.to_thread(set_values, body, fields, added)


async def pass_through(
    scope: Scope,
    send: Send,
    backend: OpenAIBackend,
    path: str,
    body: bytes,
    deadline: Deadline,
    inspector: Inspector,
    method: str = "POST",
    *,
    account: BodyAccount,
    above: bool = False,
) -> None:
    """Forward `body` to the upstream and send its answer back: streamed, followed by `inspector`, or whole.

    `above`: `path` stands beside the upstream's /v1. A large whole answer waits until `account` has room for it, and
    its upstream meanwhile. Raises `UpstreamError` and `AnswerMemoryError` before anything is sent; a stream that fails
    later ends with an error event.
    """
    record = RequestRecord.of(scope)
    query = scope.get("query_string", b"").decode("latin-1")
    forward = partial(backend.forward, method, path, query=query, tenant=record.tenant, above=above)
    async with AsyncExitStack() as stack:
        async with deadline.limit():
            response = await stack.enter_async_context(forward(headers=request_headers(scope, record), body=body))
            content = await _content(response, record, account)
        if not record.stream:
            await _send_whole(response, content, record, send, account)
        elif response.is_encoded:
            await _send_encoded(response, record, send, deadline)
        else:
            await _send_stream(response, record, send, deadline, inspector)


async def _content(response: UpstreamResponse, record: RequestRecord, account: BodyAccount) -> bytes:
    """All of an answer that is no stream. Raises `UpstreamAuthenticationError` where our key was refused."""
    record.stream = response.is_stream and response.status < 400 and response.status != _NO_CONTENT
    failed = response.status >= 400
    content = await response.aread(room=account.wait_for) if failed else b""
    record.answer_arrived(response.status, response.headers, content)
    if response.status in (401, 403) and (response.own_key or record.has_gateway_key):
        raise refused_key(f"upstream {response.name}")
    return content if failed or record.stream else await response.aread(room=account.wait_for)


def request_headers(scope: Scope, record: RequestRecord) -> dict[str, str]:
    """The client's headers with the request's labels, without those that hold a key for this gateway.

    A header that comes in several lines is one list (RFC 9110, section 5.3); of our own the first line counts.
    """
    given = Headers(scope=scope)
    headers = {name: given[name] if name.startswith(PREFIX) else ", ".join(given.getlist(name)) for name in given}
    headers |= label_headers(record.labels) | {"x-request-id": record.request_id}
    if record.has_gateway_key:
        headers = {name: value for name, value in headers.items() if name not in _KEYS}
    return headers


async def _send_whole(
    response: UpstreamResponse,
    content: bytes,
    record: RequestRecord,
    send: Send,
    account: BodyAccount,
) -> None:
    if response.status >= 400:
        record.fail("client_error" if response.status < 500 else "server_error", "upstream_status")
        content = _error_body(response, content)
        if record.anthropic:
            content = anthropic_error(content, response.status, record.request_id)
    elif not response.is_encoded:
        counts, error = await account.run(len(content), read_answer, content)
        record.read(counts)
        record.whole_arrived(len(content))
        _note_error(record, error)
        content = without_account(content) if error and response.own_key else content
    length = [(b"content-length", str(len(content)).encode())] if response.status != _NO_CONTENT else []
    await send({"type": "http.response.start", "status": response.status, "headers": [*_headers(response), *length]})
    await send({"type": "http.response.body", "body": content})


async def _send_stream(
    response: UpstreamResponse,
    record: RequestRecord,
    send: Send,
    deadline: Deadline,
    inspector: Inspector,
) -> None:
    """Send whole events, byte for byte. If the upstream stops before its answer is complete, an error event follows."""
    await send({"type": "http.response.start", "status": response.status, "headers": _headers(response)})
    splitter = EventSplitter()
    try:
        async with deadline.limit(), aclosing(response.aiter_raw()) as pieces:
            async for piece in pieces:
                if events := splitter.feed(piece):
                    inspector.read(events[splitter.whole_from :])
                    events = _told(events, response, inspector)
                    record.token_arrived(events.count(b"data:"))
                    await send({"type": "http.response.body", "body": events, "more_body": True})
        rest = splitter.rest()
        inspector.read(rest + b"\n\n")
        rest = _told(rest, response, inspector)
        if not inspector.finished:
            raise UpstreamError("the upstream ended the answer before it was finished")
    except AgentSpecError as error:
        rest = b""
        if not (inspector.done or inspector.error):
            record.fail(outcome(error), error.code)
            if isinstance(error, UpstreamError):
                record.answer_broke()
            rest = splitter.separator() + inspector.failure(error, record.request_id)
    record.read(inspector.counts)
    _note_error(record, inspector.error)
    await send({"type": "http.response.body", "body": rest})


def _told(events: bytes, response: UpstreamResponse, inspector: Inspector) -> bytes:
    """`events` as the client may have them: an error tells the operator's account to nobody."""
    return without_account(events) if inspector.error and response.own_key else events


async def _send_encoded(response: UpstreamResponse, record: RequestRecord, send: Send, deadline: Deadline) -> None:
    """Send a stream as it comes that the upstream has compressed, although it was asked not to.

    A failure is raised, which breaks the connection: no event can be put into compressed bytes.
    """
    await send({"type": "http.response.start", "status": response.status, "headers": _headers(response)})
    async with deadline.limit(), aclosing(response.aiter_raw()) as pieces:
        async for piece in pieces:
            record.token_arrived()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _error_body(response: UpstreamResponse, content: bytes) -> bytes:
    """The body of an error answer in OpenAI's form; with the operator's key, without what tells about the account."""
    if response.is_encoded:
        content = b""
        del response.headers["content-encoding"]
    body = error_object(content, response.status, f"upstream {response.name} answered {response.status}")
    if body is not content:
        response.headers["content-type"] = "application/json"
    return without_account(body) if response.own_key else body


def _note_error(record: RequestRecord, error: Any) -> None:
    """Count an answer of status 200 that reports `error` as the failure that it is."""
    if error:
        code = error.get("code") if isinstance(error, Mapping) else None
        refused = isinstance(code, int) and 400 <= code < 500
        record.fail("client_error" if refused else "server_error", "upstream_error")
        if not refused:
            record.answer_broke()


def _headers(response: UpstreamResponse) -> list[tuple[bytes, bytes]]:
    renamed = {"x-request-id": "x-upstream-request-id"}
    headers = {renamed.get(name, name): value for name, value in response.headers.items()}
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
