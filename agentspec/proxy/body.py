"""Reads a request's body, and checks that it is one JSON object that all parsers read in the same way."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from agentspec.errors import InvalidRequestError, RequestTooLargeError

BODY_SECONDS = 60.0
_BLANKS = " \t\n\r"


async def read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The request's body. Reads at most `limit` bytes, whatever Content-Length claims.

    Raises `RequestTooLargeError`, starlette's `ClientDisconnect`, and `InvalidRequestError` for a body that is
    compressed, not declared as JSON, takes more than a minute, or has both Transfer-Encoding and Content-Length.
    """
    _check_headers(headers)
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()) or int(length[:20]) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _receive_all(receive, limit)
    except TimeoutError:
        raise InvalidRequestError(f"the body did not arrive within {BODY_SECONDS:.0f} seconds") from None


def parse_object(body: bytes) -> dict[str, Any]:
    """`body` as a JSON object. Raises `InvalidRequestError` for anything else.

    Also refuses what another parser might read differently: NaN and infinities, duplicate keys, and nesting beyond
    the parser's limit.
    """
    try:
        value = json.loads(body.decode(), parse_constant=_constant, object_pairs_hook=_object)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {_reason(error)}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def set_value(body: bytes, key: str, value: Any) -> bytes:
    """Set one top-level value of `body`, an object that `parse_object` accepts, and keep every other byte.

    A new key becomes the first one.
    """
    text, decoder = body.decode(), json.JSONDecoder()
    first = position = _skip(text, 0, "{")
    while text[position] != "}":
        name, position = decoder.raw_decode(text, position)
        start = _skip(text, position, ":")
        _, position = decoder.raw_decode(text, start)
        if name == key:
            return (text[:start] + json.dumps(value) + text[position:]).encode()
        position = _skip(text, position, ",")
    comma = "" if position == first else ", "
    return f"{text[:first]}{json.dumps(key)}: {json.dumps(value)}{comma}{text[first:]}".encode()


async def _receive_all(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _check_headers(headers: Headers) -> None:
    if "transfer-encoding" in headers and "content-length" in headers:
        raise InvalidRequestError("Transfer-Encoding and Content-Length contradict each other; send one")
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise InvalidRequestError(f"Content-Encoding {encoding[:40]!r} is not taken; send the body uncompressed")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # Any web page may send other types without a preflight request (CORS "simple requests").
        raise InvalidRequestError(f"set Content-Type to application/json, not {media_type[:80]!r}")


def _too_large(limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body is larger than the limit of {limit} bytes (server.max_body_bytes)")


def _constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"the body holds {name}, which is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequestError(f"the body names the key {twice[:80]!r} twice")
    return value


def _reason(error: ValueError) -> str:
    """Where the JSON breaks, without quoting the body."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}"
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else "a number has too many digits"


def _skip(text: str, position: int, character: str) -> int:
    while position < len(text) and text[position] in _BLANKS + character:
        position += 1
    return position
