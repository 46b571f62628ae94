"""Answers in which marks part thoughts, text and calls: harmony's channels, and what a checkpoint's template says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from agentspec.backends.torch.text.tool_markup import MarkupFormat, MarkupParser, Pieces
from agentspec.text import partial_end

Parts = tuple[str, Pieces]  # the thoughts and the other pieces that some text adds
ENDS: Final = re.compile(r"<\|(?:end|call|return|start)\|>")
MESSAGE: Final = "<|message|>"
_RECIPIENT: Final = re.compile(r"to=functions\.([\w.-]+)")
HARMONY: Final = MarkupFormat(
    name="harmony",
    head="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    symbols=("<|channel|>", MESSAGE, "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"),
    separator="",
    thoughts=tuple(f"<|channel|>{name}<|message|>TEXT<|end|><|start|>assistant" for name in ("analysis", "commentary")),
    answer="<|channel|>final<|message|>",
    text=r"/(.|\n)*/",
    bare=True,
)


@dataclass(slots=True)
class JsonScanner:
    """Finds where an object ends as its text arrives, and where the first object or list inside it begins and ends.

    `broken` says that the brackets so far do not match; nothing else is checked. `text` is what was read as long as it
    was `stored`.
    """

    count: int = 0  # of the characters read
    inner: int | None = None
    inner_end: int | None = None
    complete: bool = False
    broken: bool = False
    text: str = ""
    _closings: list[str] = field(default_factory=list)
    _quoted: bool = False
    _escaped: bool = False

    def feed(self, text: str, *, stored: bool = True) -> int:
        """Take the characters of `text` that belong to the object; returns how many there were."""
        taken = 0
        while taken < len(text) and not (self.complete or self.broken):
            self._take(text[taken])
            taken += 1
        if stored:
            self.text += text[:taken]
        return taken

    def _take(self, character: str) -> None:
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            if len(self._closings) == 1 and self.inner is None:
                self.inner = self.count
            self._closings.append("}" if character == "{" else "]")
        elif character in "}]":
            self.broken = self._closings.pop() != character
            self.complete = not (self.broken or self._closings)
            if len(self._closings) == 1 and self.inner_end is None:
                self.inner_end = self.count + 1
        self.count += 1


@dataclass(slots=True)
class HarmonyParser:
    """Reads messages of a header, which names a channel and perhaps a recipient, and a body, up to a mark.

    What the model says in the channel `analysis` are thoughts; what it says to a function are the arguments of a call.
    """

    calls: MarkupParser
    _held: str = ""
    _header: str | None = None  # of the message whose body is read, empty for text; None where a header is expected
    _read: bool = False  # whether there was a message
    _object: JsonScanner | None = None  # of the call that is read

    @property
    def cut(self) -> bool:
        """Whether the arguments of the last call are not whole."""
        return self._object is not None and not self._object.complete

    def feed(self, text: str) -> Parts:
        self._held += text
        thoughts, pieces = list[str](), Pieces()
        while self._held and self._step(thoughts, pieces):
            pass
        return "".join(thoughts), pieces

    def finish(self) -> Parts:
        """What is left when no more text will come: an end token ends the last message, too."""
        thoughts, pieces = list[str](), Pieces()
        if self._header is None:
            pieces += [self._held] if self._held.strip() or not self._read else []
        elif self._object is None:
            self._say(self._held, thoughts, pieces)
        self._held = ""
        return "".join(thoughts), pieces

    def _step(self, thoughts: list[str], pieces: Pieces) -> bool:
        if self._header is None:
            return self._head(pieces)
        if recipient := _RECIPIENT.search(self._header):
            return self._arguments(recipient[1], pieces)
        end = ENDS.search(self._held)
        if end is not None:
            self._say(self._held[: end.start()], thoughts, pieces)
            self._held, self._header = self._held[end.end() :], None
            return bool(self._held)
        longest = max(partial_end(self._held, mark) for mark in HARMONY.markers)
        self._say(self._held[: len(self._held) - longest], thoughts, pieces)
        self._held = self._held[len(self._held) - longest :]
        return False

    def _arguments(self, name: str, pieces: Pieces) -> bool:
        """Pass on the arguments of a call, which end with their object; a message to a function without any is text."""
        if self._object is None:
            self._held = self._held.lstrip()
            if self._held[:1] not in ("", "{"):
                self._header = ""
            elif self._held:
                self._object = JsonScanner()
                pieces += self.calls.called(name, "")
            return bool(self._held)
        if not self._object.complete and (taken := self._object.feed(self._held, stored=False)):
            pieces += self.calls.more(self._held[:taken])
            self._held = self._held[taken:]
        elif (end := ENDS.search(self._held)) is not None:  # what lies behind the object is no part of it
            self._held, self._header, self._object = self._held[end.end() :], None, None
        else:
            return False
        return bool(self._held)

    def _head(self, pieces: Pieces) -> bool:
        """Read a header; what does not look like one is text."""
        head, mark, rest = self._held.partition(MESSAGE)
        known = head.removeprefix("<|start|>").removeprefix("assistant").lstrip()
        begins = any(known.startswith(sign) or sign.startswith(known) for sign in ("<|channel|>", "to="))
        if not (begins or "<|start|>".startswith(head) or "assistant".startswith(known)):
            self._header = ""
            return True
        if not mark:
            return False
        self._header, self._held, self._read = head, rest, True
        return True

    def _say(self, text: str, thoughts: list[str], pieces: Pieces) -> None:
        if text and "<|channel|>analysis" in (self._header or ""):
            thoughts.append(text)
        elif text:
            pieces.append(text)


@dataclass(slots=True)
class TemplateParser:
    """Reads an answer as the checkpoint's `response_template` says, by transformers' parser, each call whole. From a
    call on that it cannot read, the answer is text.
    """

    parser: Any
    calls: MarkupParser
    _unread: str = ""  # what may yet turn out to be no call
    _broken: bool = False

    def feed(self, text: str) -> Parts:
        thoughts, pieces = list[str](), Pieces()
        for character in text:  # one at a time, since the parser's error leaves out what it read before
            self._unread += character
            self._take(lambda character=character: self.parser.feed(character), thoughts, pieces)  # type: ignore[misc]
        return "".join(thoughts), pieces

    def finish(self) -> Parts:
        thoughts, pieces = list[str](), Pieces()
        self._take(lambda: self.parser.finalize()[1], thoughts, pieces)
        return "".join(thoughts), pieces

    def _take(self, read: Callable[[], list[dict[str, Any]]], thoughts: list[str], pieces: Pieces) -> None:
        try:
            events = [] if self._broken else read()
        except ValueError:
            self._broken, events = True, []
        if self._broken and self._unread:
            pieces.append(self._unread)
            self._unread = ""
        for event in events:
            if event["field"] == "tool_calls" and event["type"] == "region_close":
                self._unread = ""
                for called in event["value"] if isinstance(event["value"], list) else [event["value"]]:
                    name, given = called["function"]["name"], called["function"]["arguments"]
                    pieces += self.calls.called(
                        name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
                    )
            elif event["field"] != "tool_calls" and event["type"] == "region_chunk":
                self._unread = self._unread.partition(event["text"])[2]
                (pieces if event["field"] == "content" else thoughts).append(event["text"])
