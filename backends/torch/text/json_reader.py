"""Reads a JSON object while it is still being generated."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from io import SEEK_END, StringIO


@dataclass(slots=True)
class JsonObjectParser:
    """Follows one object character by character and notes where the values of its own keys begin and end.

    It does not check what is inside the values. Of a key that comes twice the first value counts, which may have been
    passed on already. `broken` says that the brackets so far do not match. Reading takes time in proportion to what is
    written, however many pieces it comes in.
    """

    complete: bool = False
    broken: bool = False
    _text: StringIO = field(default_factory=StringIO)
    _length: int = 0
    _stack: list[str] = field(default_factory=list)
    _quoted: bool = False
    _escaped: bool = False
    _string_at: int = 0
    _key: str | None = None
    _expects_value: bool = False
    _spans: dict[str, tuple[int, int | None]] = field(default_factory=dict)  # of values, without blanks before them

    def feed(self, text: str) -> int:
        """Take the characters of `text` that belong to the object; returns how many there were."""
        for count, character in enumerate(text):
            if self.complete or self.broken:
                return count
            self._take(character)
        return len(text)

    @property
    def keys(self) -> list[str]:
        """The object's own keys whose values have begun, in order."""
        return list(self._spans)

    def begin(self, key: str) -> int | None:
        """Where the value of `key` begins in the text; None if it has not."""
        begin, end = self._spans.get(key, (0, 0))
        return begin if begin < (self._length if end is None else end) else None

    def text(self, begin: int = 0, end: int | None = None) -> str:
        """The object's text so far, or a part of it."""
        self._text.seek(begin)
        part = self._text.read(-1 if end is None else end - begin)
        self._text.seek(0, SEEK_END)
        return part

    def value(self, key: str, start: int = 0) -> str:
        """The value of `key` so far, from character `start` on, as JSON text; empty if it has not begun."""
        begin, end = self._spans.get(key, (0, 0))
        return self.text(begin + start) if end is None else self.text(begin + start, max(begin + start, end)).rstrip()

    def ended(self, key: str) -> bool:
        """Whether the value of `key` is complete."""
        return self._spans.get(key, (0, None))[1] is not None

    def string(self, key: str) -> str | None:
        """The value of `key` if it is a complete string; else None."""
        return _string(self.value(key)) if self.ended(key) else None

    def _take(self, character: str) -> None:
        self._text.write(character)
        self._length += 1
        if self._quoted:
            self._inside_string(character)
        elif character == '"':
            self._quoted, self._string_at = True, self._length - 1
        elif character in "{[":
            self._stack.append("}" if character == "{" else "]")
        elif character in "}]":
            self._close(character)
        elif len(self._stack) == 1:
            self._separate(character)

    def _inside_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._quoted = False
            if len(self._stack) == 1 and not self._expects_value:
                self._key = _string(self.text(self._string_at))
            self._maybe_end_value()

    def _separate(self, character: str) -> None:
        if character == ":" and not self._expects_value and self._key is not None:
            self._expects_value = True
            self._spans.setdefault(self._key, (self._length, None))
        elif character == ",":
            if self._key is not None and self._expects_value:
                begin, end = self._spans[self._key]
                self._spans[self._key] = (begin, end or self._length - 1)
            self._key, self._expects_value = None, False
        elif self._expects_value and character.isspace() and self._key is not None:
            begin, end = self._spans[self._key]
            self._spans[self._key] = (begin + (begin == self._length - 1), end)

    def _close(self, character: str) -> None:
        if not self._stack or self._stack.pop() != character:
            self.broken = True
        elif self._stack:
            self._maybe_end_value()
        else:
            self._separate(",")
            self.complete = True

    def _maybe_end_value(self) -> None:
        """End the value here if it belongs to one of the object's own keys; blanks that follow are no part of it."""
        if len(self._stack) == 1 and self._expects_value and self._key is not None:
            begin, end = self._spans[self._key]
            self._spans[self._key] = (begin, end or self._length)


def _string(written: str) -> str | None:
    try:
        value = json.loads(written)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
