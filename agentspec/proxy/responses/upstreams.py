"""What the gateway must know of responses that upstreams write and store: their ids, their counts, their tenants."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.types import Message

from agentspec.protocol.errors import without_account
from agentspec.protocol.openai_responses.items import is_id
from agentspec.protocol.wire import SseDecoder, encode, named_event, object_in
from agentspec.proxy.errors import error_response
from agentspec.proxy.forwarding import Inspector

_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,15})')
_FIRST_EVENTS = 1 << 20  # bytes in which the id of a response must come


class ResponsesInspector(Inspector):
    """Follows a stream of the Responses API."""

    telling = re.compile(rb'"(?:response\.(?:completed|incomplete|failed|cancelled)|error)"')

    def __init__(self) -> None:
        super().__init__()
        self._number = -1

    def read(self, events: bytes) -> None:
        if numbers := _NUMBER.findall(events):
            self._number = int(numbers[-1])
        super().read(events)

    def failure(self, error: Exception, request_id: str) -> bytes:
        """The API's `error` event, with the number that comes next."""
        body = json.loads(without_account(error_response(error, request_id).body))["error"]
        event = {"type": "error", "code": body.get("code"), "message": body["message"], "param": body.get("param")}
        return named_event("error", encode({**event, "sequence_number": self._number + 1}))

    def read_event(self, event: Mapping[str, Any]) -> None:
        kind, response = event.get("type"), event.get("response")
        if kind == "error":
            self.error = self.error or event
        if kind in _ENDS:
            self.done = True
            self.counts = response if isinstance(response, dict) else {}
            self.error = self.error or self.counts.get("error")


Found = Callable[[str], Awaitable[None]]


class IdWatch:
    """Calls `found` with the id of the response that is sent, before anything with that id is sent.

    The id is the response's own member, in its JSON or in one of the first events of its stream: what a client wrote
    comes back in others.
    """

    def __init__(self, found: Found) -> None:
        self._found = found
        self._decoder: SseDecoder | None = None
        self._left = 0  # bytes in which the id must come

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] < 400:
            kind = dict(message["headers"]).get(b"content-type", b"")  # upstreams do not stream whatever is asked for
            self._decoder = SseDecoder() if kind.lower().startswith(b"text/event-stream") else None
            self._left = _FIRST_EVENTS
        elif self._left > 0:
            id = next(_ids_in(message["body"], self._decoder), None)
            self._left = 0 if id or self._decoder is None else self._left - len(message["body"])
            if id:
                await self._found(id)


def _ids_in(data: bytes, decoder: SseDecoder | None) -> Iterator[str]:
    events = [data] if decoder is None else decoder.feed(data)
    for value in map(object_in, events):
        response = value if decoder is None else value.get("response")
        if isinstance(response, dict) and is_id(id := response.get("id")):
            yield id
