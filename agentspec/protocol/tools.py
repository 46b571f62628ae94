"""The tools of a chat: how they are offered, chosen and named, also for other APIs, and their calls in answers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Annotated, Any

from agentspec.errors import InvalidRequestError
from agentspec.protocol.validation import REQUIRED, Model, Text, check_json, must, one_of
from agentspec.protocol.wire import loads
from agentspec.types import Delta

_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
MAX_NAME = 64
CUT_OFF = ("length", "content_filter", "cancelled")  # finish reasons of answers that were not written to their end
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
    """The names that the tools of a Responses or a Messages request have in its chat: one for each that it offers, and
    for each that its conversation speaks of. They are looked up in both directions, and never taken apart.

    A tool without a namespace has its own name, another is called `NAMESPACE__NAME`. Where that is taken, or not 64
    letters, digits, `_` and `-`, which all upstreams take, the name ends in a hash of both.
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


class _Named(Model):
    name: Text = REQUIRED


class _NamedTool(Model):
    function: _Named = REQUIRED


def _may_be_called(name: str) -> bool:
    return _TOOL_NAME.fullmatch(name) is not None and name not in CHOICES


class _Allowed(Model):
    mode: Annotated[Text, one_of("auto", "required")] = REQUIRED
    tools: list[_NamedTool] = REQUIRED


class _AllowedTools(Model):
    allowed_tools: _Allowed = REQUIRED


class _Described(Model):
    name: Annotated[Text, must(_may_be_called, " must be 1 to 128 letters, digits, '_', '-' or '.'")] = REQUIRED
    parameters: dict[str, Any] | None = None


class _Tool(Model):
    type: Annotated[Any, one_of("function")] = "function"
    function: _Described = REQUIRED


Tools = tuple[Mapping[str, Any], ...]


def parse_tools(tools: list[Any]) -> Tools:
    """`tools` as the client described them, without null fields."""
    check_json(tools, "tools")
    names = [_Tool.parse(tool, f"tools[{index}]").function.name for index, tool in enumerate(tools)]
    if len(set(names)) < len(names):
        raise InvalidRequestError("two tools have the same name", param="tools")
    described = ({name: one for name, one in tool["function"].items() if one is not None} for tool in tools)
    return tuple({"type": "function", "function": function} for function in described)


def parse_tool_choice(value: Any, tools: Tools) -> tuple[str, Tools]:
    """The tool choice, "none", "auto", "required" or the name of a tool, and those of `tools` that it allows."""
    if isinstance(value, str):
        if value not in CHOICES:
            message = "tool_choice must be none, auto, required, an object that names a tool, or allowed_tools"
            raise InvalidRequestError(message, param="tool_choice")
        return value, tools
    if not isinstance(value, Mapping) or value.get("type") != "allowed_tools":
        return _NamedTool.parse(value, "tool_choice").function.name, tools
    allowed = _AllowedTools.parse(value, "tool_choice").allowed_tools
    offered = {tool["function"]["name"]: tool for tool in tools}
    if not (named := {one.function.name for one in allowed.tools}) <= {*offered}:
        raise InvalidRequestError("tool_choice allows a tool that tools does not have", param="tool_choice")
    return allowed.mode, tuple(offered[name] for name in offered if name in named)


class CallNumbers:
    """Numbers the tool calls of one answer from 0, as they begin.

    Servers count them in other ways, too: from 1, each as 0, or not at all, so that only ids and names distinguish
    calls, whose pieces may come in turns. A call begins with its name: pieces of arguments that come before it wait.
    """

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._nameless: dict[int, dict[str, Any]] = {}
        self._named: set[int] = set()
        self._numbers: dict[int, int] = {}  # by the server's own
        self._last = 0  # the call that the last piece belongs to

    def numbered(self, delta: Delta) -> Delta:
        calls = delta.extra.get("tool_calls") or ()
        numbered = [{**call, "index": self._number(call, at, len(calls) > 1)} for at, call in enumerate(calls)]
        begun = [call for call in map(self._with_name, numbered) if call is not None]
        if delta.finish_reason is not None:
            begun += self._nameless.values()
        return replace(delta, extra={**delta.extra, "tool_calls": begun}) if calls or begun else delta

    def _with_name(self, call: dict[str, Any]) -> dict[str, Any] | None:
        """The piece, with what came of its call before its name; None as long as the call has none."""
        index = call["index"]
        if index in self._named:
            return call
        before, function = self._nameless.pop(index, {}), call.get("function", {})
        earlier = before.get("function", {})
        written = "".join(one.get("arguments") or "" for one in (earlier, function))
        call = {**before, **call, "function": {**earlier, **function, "arguments": written}}
        if not function.get("name"):
            self._nameless[index] = call
            return None
        self._named.add(index)
        return call

    def _number(self, call: Mapping[str, Any], position: int, several: bool) -> int:
        index, id, name = call.get("index"), str(call.get("id") or ""), call.get("function", {}).get("name")
        known = self._ids.index(id) if id and id in self._ids else None
        if index is None:
            number = self._last if known is None and self._last in self._nameless else known
            if number is None and not name and self._ids:
                number = min(position, len(self._ids) - 1) if several else self._last
        else:
            number = self._numbers.get(index)
            if number is not None and id and self._ids[number] not in ("", id):
                # vLLM gave each piece an id of its own, but no name
                number = None if known is None and name else number if known is None else known
        if number is None:
            number = len(self._ids)
            self._ids.append(id)
        if index is not None:
            self._numbers[index] = number
        self._last = number
        return number


@dataclass(slots=True)
class ToolCalls:
    """Tool calls of their pieces: each begins a new call or continues the arguments of one."""

    _heads: list[dict[str, Any]] = field(default_factory=list)
    _arguments: list[list[str]] = field(default_factory=list)

    def add(self, pieces: Iterable[dict[str, Any]]) -> None:
        for position, piece in enumerate(pieces):
            index, function = piece.get("index", position), piece.get("function") or {}
            if index < len(self._heads):
                self._arguments[index].append(function.get("arguments") or "")
            else:
                head = {name: value for name, value in piece.items() if name != "index"}
                self._heads.append({**head, "function": dict(function)})
                self._arguments.append([])

    def whole(self) -> list[dict[str, Any]]:
        """The calls as far as they have been written."""
        return [
            _continued(head, rest) if rest else head for head, rest in zip(self._heads, self._arguments, strict=True)
        ]


def _continued(call: dict[str, Any], rest: Iterable[str]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": "".join([function.get("arguments") or "", *rest])}}


def whole_arguments(arguments: Any, finish_reason: str | None) -> dict[str, Any] | None:
    """The arguments of a tool call, as an object; None where the call must not run: if its arguments are no JSON object
    or were cut off before they began, or a content filter refused it.
    """
    if finish_reason == "content_filter" or (not arguments and finish_reason in CUT_OFF):
        return None
    try:  # with line breaks inside of strings, but not with NaN or infinity, which JSON cannot write again
        value = loads(arguments or "{}", strict=False)
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
