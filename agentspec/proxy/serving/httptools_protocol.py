"""The protocol on httptools, which parses in C."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentspec.errors import HeadersTooLargeError
from agentspec.proxy.serving.protocol import BoundedConnection


class HttpToolsConnection(BoundedConnection, HttpToolsProtocol):
    """llhttp bounds no head and no chunk extension, and ignores the host of an absolute target."""

    _unparsed = 0  # bytes since the last head or piece of a body was complete

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > (self.config.h11_max_incomplete_event_size or 0):
            self.refuse(HeadersTooLargeError("the request's head is too long (server.max_header_bytes)"))

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        if not self.url.startswith(b"/"):
            raise ValueError("the target must be a path")  # answered with 400
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        super().on_message_complete()
