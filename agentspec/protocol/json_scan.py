"""Finds members of a JSON object in its bytes without parsing the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

WINDOW = 1 << 18
STEP = 1 << 16  # bytes looked at between two chances for other threads
_TRIES = 4
_DEEPEST = 512
# Where a key is looked at: an answer whose strings are made of it must not cost more than others.
_MOST_PLACES = 1 << 16

# For text from `mask_escapes`.
_STRING = re.compile(rb'"[^"]*+"')
_FIRST = re.compile(rb"\s*+\{")
_KEY = re.compile(rb'[\s,]*+("[^"]*+")\s*+:\s*+')
_COLON = re.compile(rb"\s*+:\s*+")
_ITEM = re.compile(rb"[\s,]*+(?=[^\s,\]])")
_BACKSLASHES = re.compile(rb"\\*+")
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
    """The value of the top-level member `key` of a JSON object; None if there is none, or it is over 256 KiB.

    Meant for a small member of a large answer, such as `usage`. The rest is not parsed, and not checked to be JSON.
    Takes time linear in the size of `body`, and little where the member is among the last ones.
    """
    ways = (_in_tail, _in_head, _anywhere)
    return next((found for way in ways if (found := way(body, key)) is not None), None)


def array_items(body: bytes, start: int, end: int) -> Iterator[bytes]:
    """The items, as JSON texts, of the array `body[start:end]`, one after the other. What breaks off is left out."""
    text, position = mask_escapes(body[start:end]), 1
    while position >= 0 and (found := _ITEM.match(text, position)) is not None:
        first, position = found.end(), _value_end(text, found.end())
        if position >= 0:
            yield body[start + first : start + position]


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


def _anywhere(body: bytes, key: str) -> Any:
    """The value, found by counting the brackets before each place where the key stands."""
    nesting = _Nesting(body)
    needle = json.dumps(key).encode()
    for place in islice(_places(body, needle), _MOST_PLACES):
        if body[place - 1 : place] == b"\\":
            continue
        nesting.advance(place)
        colon = _COLON.match(body, place + len(needle))
        if nesting.depth == 1 and not nesting.in_string and colon is not None:
            window = body[colon.end() : colon.end() + WINDOW]
            end = _value_end(mask_escapes(window), 0)
            return _value(window[:end]) if 0 <= end < len(window) else None
    return None


def _places(body: bytes, needle: bytes) -> Iterator[int]:
    """Where `needle` stands, searched in small steps, since Python cannot switch threads meanwhile."""
    for start in range(0, len(body), STEP):
        end = start + STEP + len(needle) - 1
        place = body.find(needle, start, end)
        while place >= 0:
            yield place
            place = body.find(needle, place + 1, end)


class _Nesting:
    """Reads on in a JSON text and tells how many arrays and objects, and whether a string, are open where it is."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._position = 0
        self.depth = 0
        self.in_string = False

    def advance(self, target: int) -> None:
        """Go on to `target`, a place that is not behind a backslash."""
        while self._position < target:
            end = min(self._position + STEP, target)
            if end < target and self._body[end - 1 : end] == b"\\":
                end = min(_end(_BACKSLASHES.match(self._body, end)) + 1, target)
            parts = mask_escapes(self._body[self._position : end]).split(b'"')
            outside = b"".join(parts[self.in_string :: 2])
            self.depth += sum(map(outside.count, (b"[", b"{"))) - sum(map(outside.count, (b"]", b"}")))
            self.in_string ^= len(parts) % 2 == 0
            self._position = end


def _value(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _object(text: bytes) -> dict[str, Any]:
    value = _value(text)
    return value if isinstance(value, dict) else {}


def _value_end(text: bytes, start: int) -> int:
    """The end of the value at `start`; -1 if it does not end, or is nested more deeply than anybody's answer."""
    first = text[start : start + 1]
    if first == b'"':
        return _end(_STRING.match(text, start))
    if first not in (b"[", b"{"):
        return _end(_SCALAR.match(text, start))
    depth, position = 0, start
    while position < len(text) and depth <= _DEEPEST:
        depth += 1 if text[position] in _OPENING else -1
        position += 1
        if not depth:
            return position
        position = _end(_TO_BRACKET.match(text, position))
    return -1


def _end(found: re.Match[bytes] | None) -> int:
    return -1 if found is None else found.end()
