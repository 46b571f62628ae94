"""Parses a body as one JSON object that all parsers read in the same way, and sets fields of its top level.

A body is first measured in small steps, without building anything, then parsed by orjson, so that no nesting, number of
keys or number of values costs more time or memory than the limits below allow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson

from agentspec.errors import InvalidRequestError
from agentspec.protocol.json_scan import mask_escapes, member_span

MAX_DEPTH = 128  # arrays and objects inside each other
MAX_CONTAINERS = 1 << 17  # arrays and objects
MAX_MEMBERS = 1 << 17  # of all objects
MAX_VALUES = 5 << 18  # items of all arrays and objects, above a million token ids
EXPLAINED_BYTES = 1 << 16  # a body up to this size is read again to explain what is wrong with it

_STEP = 1 << 16  # bytes measured at once, since Python cannot switch threads meanwhile
_FIRST = re.compile(rb"\s*+\{\s*+")
_NO_BRACKET = bytes(code for code in range(256) if code not in b"[]{}")
_SQUARE = bytes.maketrans(b"{}", b"[]")
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_CONTAINERS = frozenset({dict, list})
_BEYOND_64_BITS = (b"0" * 20, b"-" + b"0" * 19)


@dataclass(slots=True)
class _Shape:
    """The measures of a JSON text: its arrays and objects, members of objects, and commas; `brackets` in order."""

    containers: int = 0
    members: int = 0
    commas: int = 0
    brackets: bytes = b""

    def add(self, outside: bytes) -> None:
        """Count the next piece of the text, given without its strings. Raises `InvalidRequestError` for a limit."""
        self.members += outside.count(b":")
        self.commas += outside.count(b",")
        brackets = outside.translate(_SQUARE, _NO_BRACKET)
        self.containers += brackets.count(b"[")
        _within(self.containers, MAX_CONTAINERS, "arrays and objects")
        _within(self.members, MAX_MEMBERS, "members of objects")
        _within(self.containers + self.commas, MAX_VALUES, "values")
        if len(self.brackets) < 2 * MAX_CONTAINERS:  # more are not valid JSON
            self.brackets += brackets

    def check_depth(self) -> None:
        """Raise `InvalidRequestError` if more than `MAX_DEPTH` arrays and objects are inside each other."""
        brackets, depth = self.brackets, 0
        while b"[]" in brackets:  # the innermost ones
            brackets, depth = brackets.replace(b"[]", b""), depth + 1
            if depth > MAX_DEPTH:
                break
        if depth + brackets.count(b"[") > MAX_DEPTH:  # those that are left have no end
            raise InvalidRequestError(f"the body is nested too deeply: more than {MAX_DEPTH} arrays and objects")


def _within(count: int, most: int, name: str) -> None:
    if count > most:
        raise InvalidRequestError(f"the body holds more than {most} {name}")


def parse_object(body: bytes) -> dict[str, Any]:
    """`body` as a JSON object. Raises `InvalidRequestError` for anything else.

    Also refuses what another parser might read differently or not at all: NaN and infinities, numbers beyond a double's
    range, duplicate keys, half a surrogate pair, and more than the limits above.
    """
    shape = _shape(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {_reason(body, error)}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {type(value).__name__}")
    if not _has_members(value, shape):
        raise InvalidRequestError(_twice(body))
    digits = body.translate(_ZEROS)
    # orjson rounds integers beyond 64 bits.
    return _exact(body) if any(long in digits for long in _BEYOND_64_BITS) else value


def set_values(body: bytes, fields: Mapping[str, Any], added: Mapping[str, Any]) -> bytes:
    """`body`, which `parse_object` read as `fields`, with the top-level values `added`. Every other byte is kept.

    New keys become the first ones.
    """
    opening = _FIRST.match(body)
    start = 0 if opening is None else opening.end()
    new = b", ".join(_member(name, value) for name, value in added.items() if name not in fields)
    comma = b", " if new and fields else b""
    spans = sorted((*member_span(body, name), name) for name in added if name in fields)
    pieces, position = [body[:start], new, comma], start
    for begin, end, name in spans:
        pieces += [body[position:begin], json.dumps(added[name]).encode()]
        position = end
    return b"".join([*pieces, body[position:]])


def _member(name: str, value: Any) -> bytes:
    return f"{json.dumps(name)}: {json.dumps(value)}".encode()


def _shape(body: bytes) -> _Shape:
    shape, text, inside = _Shape(), mask_escapes(body), 0
    for start in range(0, len(text), _STEP):
        parts = text[start : start + _STEP].split(b'"')
        shape.add(b"".join(parts[inside::2]))
        inside ^= len(parts) - 1 & 1
    shape.check_depth()
    return shape


def _has_members(value: Any, shape: _Shape) -> bool:
    """Whether `value` has as many members as its text: a parser keeps one of two members with the same key."""
    members, unseen, containers = 0, shape.containers - 1, [value]
    for one in containers:
        if type(one) is dict:
            members += len(one)
            one = one.values()
        if unseen:
            for item in one:
                if type(item) in _CONTAINERS:
                    containers.append(item)
                    unseen -= 1
    return members == shape.members


def _twice(body: bytes) -> str:
    """The message for a body with a duplicate key; a long body is not read again to find its name."""
    if len(body) > EXPLAINED_BYTES:
        return "an object in the body names a key twice"
    found: list[str] = []

    def keep(pairs: list[tuple[str, Any]]) -> None:
        names: set[str] = set()
        for name, _ in pairs:
            if name in names and not found:
                found.append(name)
            names.add(name)

    json.loads(body, object_pairs_hook=keep)
    return f"the body names the key {found[0][:80]!r} twice" if found else "an object in the body names a key twice"


def _exact(body: bytes) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(body)
    except ValueError:  # Python converts at most 4,300 digits
        raise InvalidRequestError("the body is not valid JSON: a number has too many digits") from None
    return value


def _reason(body: bytes, error: orjson.JSONDecodeError) -> str:
    """Where and why the JSON breaks, without quoting the body."""
    if len(body) <= EXPLAINED_BYTES:
        try:
            json.dumps(json.loads(body.decode(), parse_constant=_constant), ensure_ascii=False).encode()
            return "a number is too large"  # which the parser of the standard library reads as infinity
        except json.JSONDecodeError as found:
            return f"{found.msg} at line {found.lineno}, column {found.colno}"
        except UnicodeDecodeError:
            return "it is not UTF-8"
        except UnicodeEncodeError:
            return "a string holds half a surrogate pair, which is not text"
        except InvalidRequestError as found:
            return found.message
        except ValueError:
            return "a number has too many digits"
    return f"{error.msg.partition(':')[0]} at line {error.lineno}, column {error.colno}"


def _constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"it holds {name}, which is not JSON")
