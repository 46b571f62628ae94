"""A session as the predictor sees it: what the user said, which calls were made and what they returned."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any

USER = "(user)"
_MOST_EVENTS = 64  # of a session that are searched for the sources of arguments
_MOST_CALLS = 1024  # that are remembered as made
_MOST_VALUES = 20_000

Selector = tuple[str, ...]
"""Where values can be found; `ToolHistory.found` lists the kinds."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool: its name and its arguments, a JSON object."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def identity(self) -> str:
        """The same for the same call. Raises `ValueError` or `TypeError` for arguments that JSON cannot hold."""
        return canonical([self.name, dict(self.arguments)])


class ToolHistory:
    """What has happened in a session so far: `made` are its calls by identity, `events` the last ones, oldest first."""

    def __init__(self) -> None:
        self.events: deque[str] = deque(maxlen=4)
        self.made: dict[str, ToolCall] = {}
        self._found: dict[Selector, deque[list[tuple[str, Any]]]] = {}
        self._selectors: dict[str, dict[Selector, None]] = {}  # by canonical value

    def says(self, text: str) -> None:
        """The user, or another caller of the agent, says something."""
        self.events.append(USER)
        self._keep([(("user", shape(span)), span) for span in spans(text)])

    def makes(self, call: ToolCall) -> None:
        """The model makes a call."""
        call = ToolCall(call.name, deepcopy(dict(call.arguments)))  # a tool may change what it is given
        self.made[call.identity] = call
        if len(self.made) > _MOST_CALLS:
            del self.made[next(iter(self.made))]
        found: list[tuple[Selector, Any]] = []
        for name, value in call.arguments.items():
            found += [(("argument", call.name, path), leaf) for path, leaf in leaves(value, name)]
        self._keep(found)

    def returns(self, name: str, content: str) -> None:
        """A tool returned `content`, as JSON or as text."""
        self.events.append(name)
        result = _parsed(content)
        found: list[tuple[Selector, Any]] = [(("result", name, path), leaf) for path, leaf in leaves(result)]
        if isinstance(result, str):
            found += [(("text", name, shape(span)), span) for span in spans(content)]
        self._keep(found)

    def found(self, selector: Selector, most: int) -> list[tuple[str, Any]]:
        """(canonical, value) of a selector, those of the latest event first, each value once, at most `most`.

        Selectors: `("user", shape)` in what the user says, `("argument", tool, path)` of earlier calls, `("result",
        tool, path)` of JSON results, `("text", tool, shape)` of other results, `("constant", JSON)`.
        """
        if selector[0] == "constant":
            return [(selector[1], json.loads(selector[1]))]
        return list(islice(self._distinct(selector), most))

    def sources(self, value: Any) -> list[Selector]:
        """Every selector that finds this value."""
        return list(self._selectors.get(canonical(value), ()))

    def used(self, tool: str, argument: str) -> set[str]:
        """The values, canonical, that calls of the tool have had in this argument."""
        calls = (call for call in self.made.values() if call.name == tool)
        return {canonical(call.arguments[argument]) for call in calls if argument in call.arguments}

    def _distinct(self, selector: Selector) -> Iterator[tuple[str, Any]]:
        seen = set()
        for event in reversed(self._found.get(selector, ())):
            for key, value in event:
                if key not in seen:
                    seen.add(key)
                    yield key, value

    def _keep(self, found: list[tuple[Selector, Any]]) -> None:
        by_selector: dict[Selector, list[tuple[str, Any]]] = {}
        for selector, value in found:
            if usable(value):
                key = canonical(value)
                by_selector.setdefault(selector, []).append((key, value))
                self._selectors.setdefault(key, {})[selector] = None
        while len(self._selectors) > _MOST_VALUES:
            del self._selectors[next(iter(self._selectors))]
        for selector, values in by_selector.items():
            self._found.setdefault(selector, deque(maxlen=_MOST_EVENTS)).append(values)


def _parsed(content: str) -> Any:
    """The JSON value of a result, or its text."""
    if content[:1] in ("{", "[", '"') or content[:1].isdigit():
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            pass
    return content.strip()


MOST_TEXT = 20_000  # characters of one text that are searched for spans
MOST_LEAVES = 2000  # values of one result
_LONGEST = 120  # characters of a value that may be an argument's source; of a list or an object in JSON

_TOKEN = re.compile(r"[#@]?\w[\w@.+:/#-]*\w|[#@]?\w")


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces. Raises `ValueError` and `TypeError` for what JSON cannot hold."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def is_json(value: Any) -> bool:
    """Whether JSON can hold a value."""
    try:
        canonical(value)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def shape(text: str) -> str:
    """The pattern of an identifier: digits with their number, capitals with theirs, words without.

    `#W1234567` is `#A1d7`, `mia_li_3668` is `a_a_d4`, `35V5SM` is `X6`.
    """
    if len(text) >= 3 and text.isascii() and text.isalnum() and text.upper() == text and not text.isdigit():
        return f"X{len(text)}"
    parts = []
    for run in re.findall(r"\d+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+|.", text):
        if run.isdigit():
            parts.append(f"d{len(run)}")
        elif run.isalpha():
            parts.append("a" if run.islower() else f"A{len(run)}" if run.isupper() else "Aa")
        else:
            parts.append(run)
    return "".join(parts)


def spans(text: str) -> list[str]:
    """Every word, identifier and date of a text, in its order."""
    return _TOKEN.findall(text[:MOST_TEXT])


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, scalar) of a JSON value in its order; list positions and keys with digits in them are `*` in the path."""
    waiting: list[tuple[str, Any]] = [(path, value)]
    given = 0
    while waiting and given < MOST_LEAVES:
        at, one = waiting.pop()
        if isinstance(one, dict):
            inside = []
            for key, item in one.items():
                if any(letter.isdigit() for letter in key):
                    inside.append((f"{at}.*key", key))
                    inside.append((f"{at}.*", item))
                else:
                    inside.append((f"{at}.{key}", item))
            waiting.extend(reversed(inside))
        elif isinstance(one, list):
            waiting.extend((f"{at}[]", item) for item in reversed(one))
        elif usable(one):
            given += 1
            yield at, one


def usable(value: Any) -> bool:
    """Whether a value may be an argument's: not empty, not long, and nothing that JSON cannot hold, such as NaN."""
    if isinstance(value, str):
        return 0 < len(value) <= _LONGEST
    return value is not None and is_json(value) and len(canonical(value)) <= _LONGEST
