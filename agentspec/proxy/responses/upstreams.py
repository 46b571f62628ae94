"""What the gateway must know of responses that upstreams write and keep: their ids, their counts, whose they are."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.types import Message, Send

from agentspec.errors import UpstreamError
from agentspec.protocol.errors import without_account
from agentspec.protocol.openai_responses.items import is_id
from agentspec.protocol.wire import SseDecoder, encode, named_event, object_in
from agentspec.proxy.errors import error_response
from agentspec.proxy.forwarding.inspection import EventInspector, read_counts
from agentspec.types import Delta

_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})')
_FIRST_EVENTS = 1 << 20  # bytes in which the id of a response must come


class ResponsesInspector(EventInspector):
    """Follows a stream of the Responses API."""

    telling = re.compile(rb'"(?:response\.(?:completed|incomplete|failed|cancelled)|error)"')

    def __init__(self) -> None:
        super().__init__()
        self._response: Mapping[str, Any] = {}
        self._number = -1

    @property
    def counts(self) -> Delta:
        return read_counts(self._response)

    def read(self, events: bytes) -> None:
        if numbers := _NUMBER.findall(events):
            self._number = int(numbers[-1])
        super().read(events)

    def failure(self, error: Exception, request_id: str) -> bytes:
        """The API's `error` event, with the number that comes next."""
        body = json.loads(without_account(error_response(error, request_id).body))["error"]
        told = {"type": "error", "code": body.get("code"), "message": body["message"], "param": body.get("param")}
        return named_event("error", encode({**told, "sequence_number": self._number + 1}))

    def read_event(self, event: Mapping[str, Any]) -> None:
        kind, response = event.get("type"), event.get("response")
        if kind == "error":
            self.error = self.error or event
        if kind in _ENDS:
            self.done = True
            self._response = response if isinstance(response, dict) else {}
            self.error = self.error or self._response.get("error")


Found = Callable[[str], Awaitable[None]]


def telling_id(send: Send, found: Found) -> Send:
    """Wrap `send` to call `found` with the id of the response that is sent, before anything with that id is sent."""
    finder: IdFinder | None = None

    async def watched(message: Message) -> None:
        nonlocal finder
        if message["type"] == "http.response.start" and message["status"] < 400:
            kind = dict(message["headers"]).get(b"content-type", b"")  # upstreams do not stream whatever is asked for
            finder = IdFinder(stream=kind.lower().startswith(b"text/event-stream"))
        if finder is not None and message["type"] == "http.response.body":
            id = finder.feed(message.get("body", b""))
            if id is not None:
                await found(id)
            if id is not None or finder.ended:
                finder = None
        await send(message)

    return watched


class IdFinder:
    """Finds the id of a response in its JSON, or in the first events of its stream.

    Looks at the object's own member alone: what a client wrote comes back in others.
    """

    def __init__(self, *, stream: bool) -> None:
        self._decoder = SseDecoder(max_event_bytes=_FIRST_EVENTS) if stream else None
        self._seen = 0
        self.ended = False

    def feed(self, data: bytes) -> str | None:
        """The id, if it is in what was fed so far."""
        self._seen += len(data)
        if self._decoder is None:
            self.ended = True
            return _id_in(data)
        self.ended = self._seen > _FIRST_EVENTS
        with suppress(UpstreamError):
            ids = (_id_in(event, streamed=True) for event in self._decoder.feed(data))
            return next(filter(None, ids), None)
        self.ended = True
        return None


def _id_in(data: str | bytes, *, streamed: bool = False) -> str | None:
    """The id of the response in `data`: an event with its beginning, or the whole."""
    value: Any = object_in(data)
    response = value.get("response") if streamed else value
    id = response.get("id") if isinstance(response, dict) else None
    return id if is_id(id) else None
