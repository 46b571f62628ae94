"""The input of a custom tool: plain text for its client, the only argument of a function in a chat."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

ARGUMENT = "input"

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAX_HEAD = 200  # characters in which the text must begin to be passed on as it comes
# What of a JSON string can be read already: half of a surrogate pair waits for the other half. Escapes are told from
# the left, since in `\\ud83d` the second backslash begins none. `\u` without four digits is no JSON, and reads as `u`.
_UNITS = re.compile(
    r"""(?:[^"\\]
    |\\u(?![dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z)[0-9a-fA-F]{4}
    |\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])
    |\\[^u])*+""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def as_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


@dataclass(slots=True)
class InputReader:
    """Reads the input out of a call's arguments as they come. The joined text does not depend on how they were cut.

    Models that are not held to the form may write something else. What does not begin as an object with the text
    `input` does, in its first 200 characters, is read at the end: the only text of an object, or else all that was
    written. Reading takes time in proportion to what is written, however many pieces it comes in.
    """

    _held: str = ""  # the beginning until it is known, then half an escape
    _other: list[str] = field(default_factory=list)  # what follows a beginning of another form
    _begun: bool = False
    _ended: bool = False

    def feed(self, arguments: str) -> str:
        """The part of the input that `arguments` adds."""
        if self._ended:
            return ""
        if not self._begun and len(self._held) >= _MAX_HEAD:
            self._other.append(arguments)
            return ""
        self._held += arguments
        if not self._begun:
            head = _HEAD.match(self._held, 0, _MAX_HEAD)  # one that ends later never counts, however it comes
            if head is None:
                return ""
            self._begun, self._held = True, self._held[head.end() :]
        return self._decoded()

    def finish(self) -> str:
        """What is left of the input when nothing more comes."""
        whole = "".join([self._held, *self._other])
        self._held, self._other = "", []
        if self._begun:
            return ""  # half an escape
        try:
            read = json.loads(whole)
        except (ValueError, RecursionError):
            return _text(whole)
        texts = [one for one in read.values() if isinstance(one, str)] if isinstance(read, dict) else []
        return _text(texts[0] if len(texts) == 1 else whole)

    def _decoded(self) -> str:
        units = _UNITS.match(self._held)
        end = units.end() if units else 0
        self._ended = self._held[end : end + 1] == '"'
        text, self._held = self._held[:end], self._held[end:]
        return _text(_ESCAPE.sub(_unescaped, text))


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _SHORT.get(code, code)


def _text(value: str) -> str:
    """`value` with its surrogates joined to characters, and those that have no other half replaced."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
