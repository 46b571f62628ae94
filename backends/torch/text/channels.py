"""Answers in which marks part thoughts, text and calls: harmony's channels, and what a checkpoint's template says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from agentspec.backends.torch.text.tool_markup import MarkupFormat, MarkupParser, Pieces
from agentspec.text import partial_end

Parts = tuple[str, Pieces]  # the thoughts and the other pieces that some text adds
ENDS: Final = re.compile(r"<\|(?:end|call|return|start)\|>")
MESSAGE: Final = "<|message|>"
HARMONY: Final = MarkupFormat(
    "harmony",
    "<|channel|>",
    "",
    lambda body, schemas: None,
    "commentary to=functions.NAME <|constrain|>json<|message|>",
    symbols=(MESSAGE, "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"),
    thoughts="<|channel|>analysis<|message|>TEXT<|end|><|start|>assistant",
    bare=True,
)


@dataclass(slots=True)
class HarmonyParser:
    """Reads messages of a header, which names a channel and perhaps a recipient, and a body, up to a mark.

    What the model says in the channel `analysis` are thoughts; what it says to a function is a call, passed on whole.
    """

    calls: MarkupParser
    _held: str = ""
    _header: str | None = None  # of the message whose body is read, empty for text; None where a header is expected
    _read: bool = False  # whether there was a message

    @property
    def cut(self) -> bool:
        return False

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
        elif not self._call(self._held, pieces):
            self._say(self._held, thoughts, pieces)
        self._held = ""
        return "".join(thoughts), pieces

    def _step(self, thoughts: list[str], pieces: Pieces) -> bool:
        if self._header is None:
            return self._head(pieces)
        called = "to=functions." in self._header
        for end in ENDS.finditer(self._held):
            if called and not self._call(self._held[: end.start()], pieces):
                continue  # the mark stands in a text among the arguments
            if not called:
                self._say(self._held[: end.start()], thoughts, pieces)
            self._held, self._header = self._held[end.end() :], None
            return bool(self._held)
        if not called:
            longest = max(partial_end(self._held, mark) for mark in HARMONY.markers)
            self._say(self._held[: len(self._held) - longest], thoughts, pieces)
            self._held = self._held[len(self._held) - longest :]
        return False

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

    def _call(self, body: str, pieces: Pieces) -> bool:
        recipient = re.search(r"to=functions\.([\w.-]+)", self._header or "")
        try:
            arguments = json.loads(body, strict=False) if recipient else None
        except (ValueError, RecursionError):
            arguments = None
        if recipient is None or not isinstance(arguments, dict):
            return False
        pieces += self.calls.called(recipient[1], arguments)
        return True


@dataclass(slots=True)
class TemplateParser:
    """Reads an answer as the checkpoint's `response_template` says, by transformers' parser, each call whole. From a
    call on that it cannot read, the answer is text.
    """

    parser: Any
    calls: MarkupParser
    _unread: str = ""  # what may yet turn out to be no call
    _broken: bool = False

    @property
    def cut(self) -> bool:
        return False

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
                    pieces += self.calls.called(name, json.loads(given) if isinstance(given, str) else given)
            elif event["field"] != "tool_calls" and event["type"] == "region_chunk":
                self._unread = self._unread.partition(event["text"])[2]
                (pieces if event["field"] == "content" else thoughts).append(event["text"])
