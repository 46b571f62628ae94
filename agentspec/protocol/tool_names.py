"""The names that the tools of a Responses or a Messages request have in its chat.

A chat has one list of functions, and upstreams limit their names: 64 letters, digits, `_` and `-`. Names are looked up
in the table of their request in both directions, and never taken apart.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

MAX_NAME = 64
DEFAULT_NAMESPACE = "functions"
"""Codex' name of the namespace of all tools that are in none."""

_VALID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_INVALID = re.compile(r"[^a-zA-Z0-9_-]")
CHOICES = ("none", "auto", "required")
"""Tool choices that are no names."""

_DIGITS = 8  # of the hash that ends a name which had to be changed

Key = tuple[str, ...]
"""A tool's namespace, "" for none, and its name."""


def key_of(name: str, namespace: str | None) -> Key:
    """The key of the tool `name` of `namespace`."""
    return ("" if namespace in (None, DEFAULT_NAMESPACE) else str(namespace), name)


@dataclass(slots=True)
class ToolNames:
    """One name for each tool that a request offers, and for each that its conversation speaks of.

    A tool without a namespace keeps its name, another is called `NAMESPACE__NAME`. Where that is taken or no name
    upstreams take, the name ends in a hash of both.
    """

    _names: dict[Key, str] = field(default_factory=dict)
    _keys: dict[str, Key] = field(default_factory=dict)

    @classmethod
    def of(cls, offered: Iterable[Key]) -> ToolNames:
        """The names of `offered`; those without a namespace come first, so that others give way to them."""
        names = cls()
        for key in sorted(offered, key=lambda key: key[0] != ""):
            names.of_key(key)
        return names

    def of_key(self, key: Key) -> str:
        """The tool's name in the chat, the same at every call."""
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self._free(key)
            self._keys[name] = key
        return name

    def key(self, chat_name: str) -> Key | None:
        """The tool that is called `chat_name` in the chat; None if there is none."""
        return self._keys.get(chat_name)

    def _free(self, key: Key) -> str:
        wanted = _wanted(key)
        if _VALID.fullmatch(wanted) and wanted not in CHOICES and wanted not in self._keys:
            return wanted
        head = _INVALID.sub("_", wanted)[: MAX_NAME - _DIGITS - 1]
        tries = (f"{head}_{_hash(key, attempt)}" for attempt in count())
        return next(name for name in tries if name not in self._keys)


def _wanted(key: Key) -> str:
    namespace, name = key
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") or name.startswith("_") else f"{namespace}__{name}"


def _hash(key: Key, attempt: int) -> str:
    return hashlib.sha256(json.dumps([*key, attempt]).encode()).hexdigest()[:_DIGITS]
