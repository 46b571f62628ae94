"""Finds members of a JSON object in its bytes without parsing the rest."""

from __future__ import annotations

import json
import re
from typing import Any

WINDOW = 1 << 18
_TRIES = 4

# For text from `mask_escapes`.
_STRING = re.compile(rb'"[^"]*+"')
_FIRST = re.compile(rb"\s*+\{")
_KEY = re.compile(rb'[\s,]*+("[^"]*+")\s*+:\s*+')
_SCALAR = re.compile(rb"[^\s,\]}]++")
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"[^"]*+")*+')
_OPENING, _CLOSING = b"[{", b"]}"


def mask_escapes(body: bytes) -> bytes:
    """`body` with escaped backslashes and quotes overwritten, so that every quote left begins or ends a string."""
    return body.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in body else body


def member_span(body: bytes, key: str) -> tuple[int, int]:
    """Where the value of the top-level member `key` begins and ends in `body`, a valid JSON object.

    Takes time linear in the bytes before the end of the value. Raises `KeyError` if there is no such member.
    """
    text = mask_escapes(body)
    position = _end(_FIRST.match(text))
    while position >= 0 and (found := _KEY.match(text, position)) is not None:
        start = found.end()
        position = _value_end(text, start)
        if position >= 0 and json.loads(body[slice(*found.span(1))].decode()) == key:
            return start, position
    raise KeyError(key)


def top_level_value(body: bytes, key: str) -> Any:
    """The value of the top-level member `key` of a JSON object; None if it is not in the first or last 256 KiB.

    Meant for a small member of a large answer, such as `usage`. The rest is not checked to be JSON.
    """
    found = _in_tail(body, key)
    return _in_head(body, key) if found is None else found


def _in_tail(body: bytes, key: str) -> Any:
    """The value, if `key` and all that follows it are members of an object that ends with the body."""
    needle, end = json.dumps(key).encode(), len(body)
    for _ in range(_TRIES):
        end = body.rfind(needle, max(0, len(body) - WINDOW), end)
        if end < 0:
            return None
        if body[end - 1 : end] != b"\\":  # else the quote is a part of a string
            rest = _object(b"{" + body[end:])
            if key in rest:
                return rest[key]
    return None


def _in_head(body: bytes, key: str) -> Any:
    head = body[:WINDOW]
    try:
        start, end = member_span(head, key)
    except (KeyError, ValueError):
        return None
    # A value that ends with the window may have been cut.
    return _value(head[start:end]) if end < len(head) else None


def _value(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _object(text: bytes) -> dict[str, Any]:
    value = _value(text)
    return value if isinstance(value, dict) else {}


def _value_end(text: bytes, start: int) -> int:
    """The end of the value at `start`; -1 if it does not end."""
    first = text[start : start + 1]
    if first == b'"':
        return _end(_STRING.match(text, start))
    if first not in (b"[", b"{"):
        return _end(_SCALAR.match(text, start))
    depth, position = 0, start
    while position < len(text):
        depth += 1 if text[position] in _OPENING else -1
        position += 1
        if not depth:
            return position
        position = _end(_TO_BRACKET.match(text, position))
    return -1


def _end(found: re.Match[bytes] | None) -> int:
    return -1 if found is None else found.end()
