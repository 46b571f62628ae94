"""Reads a request's body, at most the allowed number of bytes, and refuses what is not declared as plain JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from agentspec.errors import InvalidRequestError, RequestTooLargeError

_CHARSETS = frozenset({"charset=utf-8", "charset=utf8", "charset=us-ascii"})


async def read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The request's body. Reads at most `limit` bytes, whatever Content-Length claims.

    The connection and the request's deadline bound its time. Raises `RequestTooLargeError`, starlette's
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
        raise InvalidRequestError(f"Transfer-Encoding {coding[:40]!r} is not accepted; use chunked only")
    encoding = ", ".join(headers.getlist("content-encoding")).lower() or "identity"
    if encoding != "identity":
        raise InvalidRequestError(f"Content-Encoding {encoding[:40]!r} is not accepted; send the body uncompressed")
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


MAX_DEPTH = 128  # arrays and objects inside each other
MOST = {
    b"[{": 1 << 18,
    b":": 1 << 19,
    b",": 5 << 18,
}  # of these characters, in strings too: what a body becomes in memory

_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 19  # orjson rounds integers beyond 64 bits
# Other ways to write the end of a key than `":`, with which the keys cannot be counted by it.
_SPACED = (b" :", b"\t:", b"\n:", b"\r:")
_ESCAPED = re.compile(rb"\\u00(?:22|3[aA])")


def parse_object(body: bytes) -> dict[str, Any]:
    """`body` as a JSON object. Raises `InvalidRequestError` for anything else.

    Also refuses what another parser might read differently or not at all: NaN and infinities, numbers beyond a double's
    range, duplicate keys, a lone surrogate, and more than the limits above.
    """
    _check_size(body)
    try:
        value: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequestError(f"the body is not valid JSON: {error.msg} at {where}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {type(value).__name__}")
    fields: dict[str, Any] = value
    members = _members(value)
    unclear = any(one[:1] in body and one in body for one in _SPACED) or _ESCAPED.search(body)
    if unclear or _LONG_NUMBER in body.translate(_ZEROS) or _has_twice(body, members, value):
        return _exact(body)
    return fields


def set_values(fields: Mapping[str, Any], added: Mapping[str, Any]) -> bytes:
    """A body with these `fields` and what is `added`, the new keys first."""
    value = {**{name: added[name] for name in added if name not in fields}, **fields, **added}
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _check_size(body: bytes) -> None:
    if len(body) <= min(MOST.values()):
        return
    for characters, most in MOST.items():
        if sum(body.count(bytes([one])) for one in characters) > most:
            shown = " or ".join(map(chr, characters))
            raise InvalidRequestError(f"the body holds {shown} more than {most:,} times: send less at once")


def _members(value: Any) -> int:
    """How many members all objects have. Raises `InvalidRequestError` if they are nested too deeply."""
    level, members = [value], 0
    for _ in range(MAX_DEPTH):
        members += sum(len(one) for one in level if type(one) is dict)
        inner = (one.values() if type(one) is dict else one for one in level)
        if not (level := [item for items in inner for item in items if type(item) in (dict, list)]):
            return members
    raise InvalidRequestError(f"the body is nested too deeply: more than {MAX_DEPTH} arrays and objects")


def _has_twice(body: bytes, members: int, value: Any) -> bool:
    keys = body.count(b'":')  # and what strings say
    return keys != members and keys != orjson.dumps(value).count(b'":')


def _exact(body: bytes) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(body, object_pairs_hook=_once)
    except ValueError:  # Python converts at most 4,300 digits
        raise InvalidRequestError("the body is not valid JSON: a number has too many digits") from None
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequestError(f"the body names the key {twice[:80]!r} twice")
    return value
