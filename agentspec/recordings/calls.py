"""Reads recorded model calls from JSON lines: traces, logged requests with responses, conversations for fine-tuning.

Lines that violate their format are reported with file and line number; the caller decides what to do with them.
docs/cache.md describes the formats.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, cast

from agentspec.errors import ConfigurationError
from agentspec.types import Labels, Message


class Format(StrEnum):
    """The format of a file. This module recognises `checkpoints` and `export` but does not read them."""

    trace = "trace"
    log = "log"
    chat = "chat"
    checkpoints = "checkpoints"
    export = "export"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call: the messages (or `prompt`, if it was plain text), the model's answer, and the place in the file.

    `finished` tells that no length limit cut the answer. `created_at` is in seconds since 1970, None if not recorded.
    """

    place: str
    labels: Labels
    messages: Sequence[Message]
    answer: Message
    prompt: str | None = None
    finished: bool = True
    created_at: float | None = None


class BadLineError(ConfigurationError):
    """Raised for a line that violates its format, with the file and line number."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place


OnBad = Callable[[BadLineError], None]
"""Called for each bad line, which is then skipped; an exception that it raises ends the reading."""

Parser = Callable[[dict[str, Any], str], Iterator[RecordedCall]]


def refuse(error: BadLineError) -> None:
    """The `OnBad` that raises for every bad line."""
    raise error


def detect(path: Path) -> Format:
    """The format of a file, found by its first line. Raises `ConfigurationError` for an unknown format."""
    with _opened(path) as file:
        head = file.readline(1 << 26)
    if head.startswith(b"SQLite format 3\0"):
        return Format.checkpoints
    try:
        record = _object(head, f"{path}:1")
    except BadLineError:
        record = {}
    for format_, keys in _SIGNS.items():
        if any(key in record for key in keys):
            return format_
    raise ConfigurationError(f"{path}: no format that is known here; name it with --format ({', '.join(Format)})")


_SIGNS = {
    Format.export: ("agentspec_export",),
    Format.trace: ("messages_delta",),
    Format.log: ("request", "response", "body", "choices"),
    Format.chat: ("messages",),
}


def read(path: Path, format_: Format, on_bad: OnBad = refuse) -> Iterator[RecordedCall]:
    """The calls of a file of JSON lines (format trace, log or chat), in order."""
    parse = {Format.trace: _Traces().parse, Format.log: _parse_log, Format.chat: _parse_chat}[format_]
    for place, line in lines(path):
        try:
            yield from list(parse(_object(line, place), place))
        except BadLineError as error:
            on_bad(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            on_bad(BadLineError(place, f"not a line of format {format_} ({type(error).__name__}: {error})"))


def lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(place, bytes) of every line that is not blank, of a file that may be compressed with gzip.

    Raises `ConfigurationError` if the file cannot be read.
    """
    with _opened(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
        except (OSError, EOFError) as error:
            raise ConfigurationError(f"{path}: cannot be read to its end: {error}") from None


def _opened(path: Path) -> IO[bytes]:
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        return cast(IO[bytes], gzip.open(path, "rb")) if compressed else path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLineError(place, f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadLineError(place, "not a JSON object")
    return value


class _Traces:
    """Keeps each session's messages: a line holds the messages added since, and `reset` starts an empty history."""

    def __init__(self) -> None:
        self._history: dict[str, list[Message]] = {}

    def parse(self, record: dict[str, Any], place: str) -> Iterator[RecordedCall]:
        session, added, answer = str(record["session"]), _messages(record["messages_delta"]), record["response"]
        if not isinstance(answer, str):
            raise TypeError("response must be a string")
        history = [] if record.get("reset") else self._history.get(session, [])
        message = {"role": "assistant", "content": answer}
        yield RecordedCall(place, _labels(record, session), [*history, *added], message)
        self._history[session] = [*history, *added, message]


def _parse_chat(record: dict[str, Any], place: str) -> Iterator[RecordedCall]:
    """Every assistant message of a conversation as the answer to the messages before it."""
    messages = _messages(record["messages"])
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise BadLineError(place, "no message of role assistant")
    for number in answers:
        yield RecordedCall(place, _labels(record, Path(place).name), messages[:number], messages[number])


def _parse_log(record: dict[str, Any], place: str) -> Iterator[RecordedCall]:
    """The calls of a request and its response, each of which is the body itself or, as in batches, an object with it.

    The request may be missing, as in the output of a batch; its answers are then read without messages before them.
    """
    request, response = _body(record.get("request", record)), _body(record.get("response", record))
    if isinstance(response, str):
        response = {"choices": [{"message": {"role": "assistant", "content": response}}]}
    choices = response.get("choices")
    if not choices:
        raise BadLineError(place, "no answer in the response")
    metadata = {**(request.get("metadata") or {}), **(record.get("metadata") or {}), **record}
    labels = _labels(metadata, str(record.get("custom_id") or Path(place).name))
    messages, prompt = _messages(request.get("messages") or []), request.get("prompt")
    for choice in choices:
        message = choice["message"] if "message" in choice else {"role": "assistant", "content": choice["text"]}
        yield RecordedCall(
            place,
            labels,
            messages,
            message,
            prompt if isinstance(prompt, str) else None,
            finished=choice.get("finish_reason") != "length",
            created_at=_number(response.get("created")),
        )


def _body(value: Any) -> Any:
    return value["body"] if isinstance(value, dict) and isinstance(value.get("body"), dict) else value


def _labels(record: Mapping[str, Any], session: str) -> Labels:
    named = (record.get(name) for name in ("session", "workflow", "step"))
    given = [str(value) if isinstance(value, str | int) and value != "" else None for value in named]
    return Labels(given[0] or session, given[1], given[2])


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise TypeError("messages must be an array")
    for message in value:
        if not isinstance(message["role"], str):
            raise TypeError("a message's role must be a string")
    return value


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
