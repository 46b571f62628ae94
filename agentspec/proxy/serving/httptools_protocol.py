"""The protocol on httptools, which parses in C."""

from __future__ import annotations

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentspec.errors import HeadersTooLargeError
from agentspec.proxy.serving.protocol import BoundedConnection

_FRAMING = (b"content-length", b"transfer-encoding")
_BEFORE_BODY = ("on_message_begin", "on_url", "on_header", "on_headers_complete")


class HttpToolsConnection(BoundedConnection, HttpToolsProtocol):
    """llhttp bounds no head and no chunk extension, ignores the host of an absolute target, and tells no headers from
    the fields behind a body.
    """

    _unparsed = 0  # bytes since the last head or piece of a body was complete

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _RequestParser(self, self)

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > (self.config.h11_max_incomplete_event_size or 0):
            self.refuse(HeadersTooLargeError("the request's head is too long (server.max_header_bytes)"))

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        if not self.url.startswith(b"/"):
            raise ValueError("the target must be a path")  # answered with 400
        if self.parser.get_http_version() == "1.0" and any(name == b"transfer-encoding" for name, _ in self.headers):
            raise ValueError("HTTP/1.0 has no chunks")  # RFC 9112, section 6.1: others may read no body
        if self.cycle is not None and not self.cycle.response_complete:
            # uvicorn would queue it without a bound, and no longer notice that the client of the first one leaves.
            raise ValueError("a request before the answer to the one before")  # the answer is then the last one
        super().on_headers_complete()
        self.headers = []  # takes the fields behind a body, which are no headers: nobody in front has looked at them

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        if not self.parser.should_upgrade():  # else the body is still to come
            super().on_message_complete()

    def read_body(self, data: bytes) -> None:
        """Go on behind a head that offered an upgrade, of which `data` is the rest, with a new parser."""
        resumed = _AfterHead(self)
        self.parser = _RequestParser(self, resumed)
        framing = [name + b": " + value + b"\r\n" for name, value in self.scope["headers"] if name in _FRAMING]
        self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"]))
        resumed.in_head = False
        self.parser.feed_data(data)


class _RequestParser(httptools.HttpRequestParser):
    """Takes no offer of another protocol, which Java's clients make with every first request.

    httptools skips the body of such a request, so that its content would be read as the next request.
    """

    def __init__(self, connection: HttpToolsConnection, callbacks: object) -> None:
        super().__init__(callbacks)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's: such data is dropped
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._connection.read_body(bytes(data[upgrade.args[0] :]))


class _AfterHead:
    """The callbacks of a parser that is first given the framing of a body whose head the connection knows."""

    def __init__(self, connection: HttpToolsConnection) -> None:
        self._connection = connection
        self.in_head = True

    def __getattr__(self, name: str) -> Any:
        callback = getattr(self._connection, name)
        if name not in _BEFORE_BODY:
            return callback
        return lambda *given: None if self.in_head else callback(*given)
