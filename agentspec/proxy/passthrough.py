"""Requests to upstream models: bytes in, the same bytes out."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope, Send

from agentspec.backends.openai import OpenAIBackend, UpstreamResponse
from agentspec.backends.openai.payload import to_delta
from agentspec.errors import AgentSpecError, InvalidRequestError, UpstreamError
from agentspec.protocol.sse import SseDecoder
from agentspec.proxy.body import set_value
from agentspec.proxy.deadlines import Deadline
from agentspec.proxy.errors import event_body, outcome
from agentspec.proxy.request_record import Exchange
from agentspec.runtime import Route
from agentspec.types import Labels

# Fields with which a gateway further on could be told to send the request, and its key, somewhere else.
URL_FIELDS = frozenset({"api_base", "base_url", "model_url"})
# What stands below these is text, or the shape of text: no server takes an address from there.
_TEXT_FIELDS = frozenset(
    "messages prompt input prediction metadata response_format guided_json structured_outputs".split()
)
_SCHEMA_FIELDS = frozenset({"parameters", "input_schema"})  # of a tool
_LABELLED = ("/chat/completions", "/completions")  # where vLLM takes arguments beside OpenAI's
MAX_HELD = 1 << 20
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"|data:\s*\[DONE\]')


def check_upstream_fields(fields: Mapping[str, Any], max_messages: int) -> None:
    """Refuse what must not travel on; everything else does. Raises `InvalidRequestError`."""
    for path in _addressed(fields):
        raise InvalidRequestError(f"{path} is refused: upstreams are configured, not requested", param=path)
    messages = fields.get("messages")
    if isinstance(messages, list) and len(messages) > max_messages:
        raise InvalidRequestError(f"messages has {len(messages)} entries; {max_messages} are allowed", param="messages")


def _addressed(fields: Mapping[str, Any]) -> Iterator[str]:
    """The dotted paths of fields that name a URL, at any depth, outside of texts and of the schemas of tools."""
    waiting: list[tuple[str, Any]] = [(name, value) for name, value in fields.items() if name not in _TEXT_FIELDS]
    yield from (name for name in fields if name.lower() in URL_FIELDS)
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, dict):
            yield from (f"{path}.{name}" for name in value if name.lower() in URL_FIELDS)
            tool = path.startswith(("tools[", "functions["))
            waiting += [
                (f"{path}.{name}", item) for name, item in value.items() if not tool or name not in _SCHEMA_FIELDS
            ]


async def labelled(backend: OpenAIBackend, path: str, body: bytes, fields: Mapping[str, Any], labels: Labels) -> bytes:
    """`body`, which holds `fields`, with the labels in it where the upstream is vLLM; for others the same bytes.

    Token ids are not asked for on behalf of a client: it would get events, and fields, that it did not ask for.
    """
    added = await backend.label_fields(labels, fields) if path in _LABELLED else {}
    for name, value in added.items():
        body = set_value(body, name, value)
    return body


async def pass_through(
    scope: Scope, send: Send, route: Route, path: str, body: bytes, model: str, deadline: Deadline
) -> None:
    """Send `body` on with at most its model renamed, and the answer back as it is, stream or not.

    Raises `UpstreamError` while nothing was sent yet; a stream that breaks later ends with an error event.
    """
    exchange = Exchange.of(scope)
    assert isinstance(route.backend, OpenAIBackend)
    if route.upstream_model != model:
        body = set_value(body, "model", route.upstream_model)
    query = scope.get("query_string", b"").decode("latin-1")
    headers = request_headers(scope, exchange)
    async with AsyncExitStack() as stack:
        async with deadline.limit():
            response = await stack.enter_async_context(
                route.backend.forward("POST", path, headers=headers, body=body, query=query)
            )
            exchange.stream = response.is_stream and response.status < 400
            content = b"" if exchange.stream else await response.aread()
        if exchange.stream:
            await _stream(response, exchange, send, deadline)
        else:
            await _whole(response, content, exchange, send)


def request_headers(scope: Scope, exchange: Exchange) -> dict[str, str]:
    """The client's headers, without the key where it was meant for this gateway."""
    headers = dict(Headers(scope=scope)) | {"x-request-id": exchange.request_id}
    if scope["agentspec.settings.api_keys"]:
        headers.pop("authorization", None)
    return headers


async def _whole(response: UpstreamResponse, content: bytes, exchange: Exchange, send: Send) -> None:
    note(exchange, content)
    if response.status >= 400:
        exchange.outcome, exchange.error = _outcome(response.status), "upstream_status"
    length = (b"content-length", str(len(content)).encode())
    await send({"type": "http.response.start", "status": response.status, "headers": [*_headers(response), length]})
    await send({"type": "http.response.body", "body": content})


async def _stream(response: UpstreamResponse, exchange: Exchange, send: Send, deadline: Deadline) -> None:
    """Pass whole events on, byte for byte, reading usage from a tee.

    The piece of an event that has no end yet is held back, up to a megabyte: no client can use it, and if the
    upstream breaks off there, what the client gets is an error event and not half a JSON object.
    """
    await send({"type": "http.response.start", "status": response.status, "headers": _headers(response)})
    tee = Tee()
    try:
        async with aclosing(deadline.within(response.aiter_raw())) as pieces:
            async for piece in pieces:
                if whole_events := tee.feed(piece):
                    exchange.token_arrived()
                    await send({"type": "http.response.body", "body": whole_events, "more_body": True})
        if not tee.finished:
            raise UpstreamError("the upstream ended the answer before it was finished")
        rest = tee.rest()
    except AgentSpecError as error:
        exchange.outcome, exchange.error = outcome(error), error.code
        rest = tee.separator() + b"data: " + event_body(error) + b"\n\n"
    tee.note(exchange)
    await send({"type": "http.response.body", "body": rest})


class Tee:
    """Cuts a stream of bytes behind its events and watches what passes."""

    def __init__(self) -> None:
        self.finished = False
        self._telling: deque[bytes] = deque(maxlen=4)
        self._held = bytearray()
        self._broken_event = False

    def feed(self, piece: bytes) -> bytes:
        """The bytes that may go out now: everything up to the last event's end, or all if too much is held."""
        searched = max(0, len(self._held) - 3)
        self._held += piece
        end = 0
        for match in _EVENT_END.finditer(self._held, searched):
            end = match.end()
        if end == 0 and len(self._held) > MAX_HELD:
            end, self._broken_event = len(self._held), True
        elif end:
            self._broken_event = False
        out = bytes(self._held[:end])
        del self._held[:end]
        self.finished = self.finished or _FINISHED.search(out) is not None
        if b'"usage"' in out or b'"speculation"' in out:
            self._telling.append(out)
        return out

    def note(self, exchange: Exchange) -> None:
        """Read the counts from the last events that had any."""
        decoder = SseDecoder(max_event_bytes=2 * MAX_HELD)
        with suppress(UpstreamError):
            for data in (data for piece in self._telling for data in decoder.feed(piece)):
                note(exchange, data.encode())

    def rest(self) -> bytes:
        """What is still held at a good end: an upstream may leave out the last blank line."""
        return bytes(self._held)

    def separator(self) -> bytes:
        """What ends an event of which a part went out already."""
        return b"\n\n" if self._broken_event else b""


def note(exchange: Exchange, content: bytes) -> None:
    """Read the counts of a JSON answer or event, where it has some that make sense."""
    with suppress(UpstreamError, ValueError, RecursionError):
        delta = to_delta(json.loads(content))
        exchange.usage = delta.usage or exchange.usage
        exchange.speculation = delta.speculation or exchange.speculation


def _headers(response: UpstreamResponse) -> list[tuple[bytes, bytes]]:
    renamed = {"x-request-id": "x-upstream-request-id"}
    headers = {renamed.get(name, name): value for name, value in response.headers.items()}
    return [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]


def _outcome(status: int) -> str:
    return "client_error" if status < 500 else "server_error"
