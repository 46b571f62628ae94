"""Reads a request's body, at most the allowed number of bytes, and refuses what is not declared as plain JSON."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from agentspec.errors import InvalidRequestError, RequestTooLargeError

_CHARSETS = frozenset({"charset=utf-8", "charset=utf8", "charset=us-ascii"})


async def read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The request's body. Reads at most `limit` bytes, whatever Content-Length claims.

    How slowly it may come, the connection and the request's deadline decide. Raises `RequestTooLargeError`, starlette's
    `ClientDisconnect`, and `InvalidRequestError` for a body that is compressed in either way, not declared as JSON, or
    has both Transfer-Encoding and Content-Length.
    """
    _check_headers(headers)
    length = headers.get("content-length", "0").strip(" \t")  # RFC 9110, 5.5
    if not (length.isascii() and length.isdigit()) or int(length[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        if len(body) + len(piece) > limit:
            raise _too_large(limit)
        if not body and not message.get("more_body", False):
            return bytes(piece)
        body += piece
        if not message.get("more_body", False):
            return bytes(body)


def _check_headers(headers: Headers) -> None:
    if "transfer-encoding" in headers and "content-length" in headers:
        raise InvalidRequestError("Transfer-Encoding and Content-Length contradict each other; send one")
    coding = ", ".join(headers.getlist("transfer-encoding")).lower() or "chunked"
    if coding != "chunked":  # a server in front of this one may have unpacked "gzip, chunked", and this one does not
        raise InvalidRequestError(f"Transfer-Encoding {coding[:40]!r} is not taken; send chunks alone")
    encoding = ", ".join(headers.getlist("content-encoding")).lower() or "identity"
    if encoding != "identity":
        raise InvalidRequestError(f"Content-Encoding {encoding[:40]!r} is not taken; send the body uncompressed")
    given = headers.getlist("content-type")
    media_type, _, parameters = given[0].lower().partition(";") if given else ("", "", "")
    if media_type.strip() != "application/json" or len(given) > 1:
        # Any web page may send other types without a preflight request (CORS "simple requests").
        shown = ", ".join(given)[:80]
        raise InvalidRequestError(f"set Content-Type to application/json, not {shown!r}")
    if "charset" in parameters and parameters.replace(" ", "").replace('"', "") not in _CHARSETS:
        raise InvalidRequestError("the charset of JSON is UTF-8")  # an upstream might read another one


def _too_large(limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body is larger than the limit of {limit} bytes (server.max_body_bytes)")
