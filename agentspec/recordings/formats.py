"""Recognises the format of a file or folder of recorded model calls, and reads it. docs/cache.md describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError
from agentspec.recordings.calls import (
    CUT_OR_DAMAGED,
    BadLineError,
    OnBad,
    RecordedCall,
    json_object,
    lines,
    opened,
    refuse,
    seconds_in,
)
from agentspec.recordings.claude_code import logged_message, read_claude_code
from agentspec.recordings.codex import logged_response, read_codex
from agentspec.types import Labels, Message


class Format(StrEnum):
    """The format of a file."""

    trace = "trace"
    log = "log"
    chat = "chat"
    claude_code = "claude-code"
    codex = "codex"


# In this order: files of the formats below may have these keys, too.
_SIGNS = {
    Format.trace: ("messages_delta",),
    Format.log: ("request", "response", "body", "choices"),
    Format.chat: ("messages",),
    Format.claude_code: ("parentUuid", "isSidechain", "leafUuid", "sessionId"),
}
_CODEX = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")
_VIOLATIONS = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
_HEAD = 20  # lines; the first may be about something else
_LONGEST = 1 << 26  # bytes


def detect(path: Path) -> Format:
    """The format of a file, found by its first lines. Raises `ConfigurationError` if none is known."""
    with opened(path) as file:
        try:
            heads = (line for line in iter(lambda: file.readline(_LONGEST), b"") if line.strip())
            found = filter(None, (_recognised(head, f"{path}:1") for head in islice(heads, _HEAD)))
            if format_ := next(found, None):
                return format_
        except CUT_OR_DAMAGED as error:
            raise ConfigurationError(f"{path}: cannot be read: {error}") from None
    raise ConfigurationError(f"{path}: unknown format; name it with --format ({', '.join(Format)})")


def _recognised(head: bytes, place: str) -> Format | None:
    try:
        record = json_object(head, place)
    except BadLineError:
        return None
    for format_, keys in _SIGNS.items():
        if any(key in record for key in keys):
            return format_
    return Format.codex if record.get("type") in _CODEX else None


def files_of(path: Path, unknown: Callable[[Path], None]) -> Iterator[Path]:
    """`path`, or all files of known formats below that folder, sorted; links are not followed.

    `unknown` is called for the others, and for folders that cannot be read.
    """
    try:
        is_file = not path.is_dir()
        children = [] if is_file else [one for one in sorted(path.iterdir()) if not one.is_symlink()]
        folders = {one for one in children if one.is_dir()}
        children = [one for one in children if one in folders or one.is_file()]
    except OSError:
        unknown(path)
        return
    if is_file:
        yield path
    for child in children:
        if child in folders:
            yield from files_of(child, unknown)
            continue
        try:
            detect(child)
        except ConfigurationError:
            unknown(child)
        else:
            yield child


def read(path: Path, format_: Format | None = None, on_bad: OnBad = refuse) -> Iterator[RecordedCall]:
    """The calls of a file in order; its format is found by `detect` if it is not given."""
    format_ = format_ or detect(path)
    sessions = {Format.claude_code: read_claude_code, Format.codex: read_codex}
    if format_ not in sessions:
        yield from _lines(path, format_, on_bad)
        return
    try:
        yield from sessions[format_](path, on_bad)
    except BadLineError as error:
        on_bad(error)
    except _VIOLATIONS as error:
        on_bad(BadLineError(str(path), f"not of format {format_} ({type(error).__name__}: {error})"))


def _lines(path: Path, format_: Format, on_bad: OnBad) -> Iterator[RecordedCall]:
    parsers: dict[Format, Callable[[dict[str, Any], str], Iterator[RecordedCall]]] = {
        Format.trace: Traces().parse,
        Format.log: parse_log,
        Format.chat: parse_chat,
    }
    parse = parsers[format_]
    for place, line in lines(path):
        try:
            yield from list(parse(json_object(line, place), place))
        except BadLineError as error:
            on_bad(error)
        except _VIOLATIONS as error:
            on_bad(BadLineError(place, f"not a line of format {format_} ({type(error).__name__}: {error})"))


class Traces:
    """Lines of traces. A line holds the messages added since, and `reset` starts an empty history."""

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


def parse_chat(record: dict[str, Any], place: str) -> Iterator[RecordedCall]:
    """Every assistant message of a conversation as the answer to the messages before it."""
    messages = _messages(record["messages"])
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise BadLineError(place, "no message of role assistant")
    for number in answers:
        yield RecordedCall(place, _labels(record, Path(place).name), messages[:number], messages[number])


def parse_log(record: dict[str, Any], place: str) -> Iterator[RecordedCall]:
    """The calls of a request and its response, each of which is the body itself or, as in batches, an object with it.

    The request may be missing, as in the output of a batch; its answers are then read without messages before them.
    """
    request, response = _body(record.get("request", record)), _body(record.get("response", record))
    metadata = {**(request.get("metadata") or {}), **(record.get("metadata") or {}), **record}
    labels = _labels(metadata, str(record.get("custom_id") or Path(place).name))
    for call in _logged(request, response, place):
        yield replace(call, labels=labels)


def _logged(request: Any, response: Any, place: str) -> Iterator[RecordedCall]:
    """The answers of a response of any of the three APIs; they are distinguished by the response's own fields."""
    if isinstance(response, str):
        response = {"choices": [{"message": {"role": "assistant", "content": response}}]}
    if response.get("choices"):
        yield from _chat_choices(request, response, place)
    elif isinstance(response.get("output"), list):
        yield from logged_response(request, response, place)
    elif response.get("type") == "message" and isinstance(response.get("content"), list):
        yield logged_message(request, response, place)
    else:
        raise BadLineError(place, "no answer in the response")


def _chat_choices(request: Mapping[str, Any], response: Mapping[str, Any], place: str) -> Iterator[RecordedCall]:
    messages, prompt = _messages(request.get("messages") or []), request.get("prompt")
    for choice in response["choices"]:
        answered = choice["message"] if "message" in choice else {"content": choice["text"]}
        message = _message({"role": "assistant", **answered})
        yield RecordedCall(
            place,
            Labels(),
            messages,
            message,
            prompt if isinstance(prompt, str) else None,
            finished=choice.get("finish_reason") != "length",
            created_at=seconds_in(response.get("created")),
            id=response.get("id"),
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
    return [_message(message) for message in value]


def _message(value: Any) -> Message:
    """A message that every reader can take. Raises `TypeError` for another shape."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise TypeError("a message must be an object with a role")
    if not isinstance(value.get("content"), str | list | None):
        raise TypeError("a message's content must be a string or an array")
    calls = value.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise TypeError("a message's tool_calls must be an array of objects")
    return value
