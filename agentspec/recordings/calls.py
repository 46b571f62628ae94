"""What readers of recorded model calls share: the calls, conversations as turns, bad lines, and files of lines.

Lines that violate their format are reported with file and line number; the caller decides what to do with them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

from agentspec.errors import ConfigurationError
from agentspec.types import Labels, Message


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call: the messages (or `prompt`, if it was plain text), the model's answer, and the place in the file.

    `finished`: no length limit cut the answer. `created_at` is in seconds since 1970, None if not recorded. With its
    `id` an answer is known in another file too, say of a session that was resumed or forked.
    """

    place: str
    labels: Labels
    messages: Sequence[Message]
    answer: Message
    prompt: str | None = None
    finished: bool = True
    created_at: float | None = None
    id: str | None = None


class BadLineError(ConfigurationError):
    """Raised for a line that violates its format, with the file and line number."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place


CUT_OR_DAMAGED = (OSError, EOFError, zlib.error)
"""What reading a file raises that may be compressed with gzip."""

OnBad = Callable[[BadLineError], None]
"""Called for each bad line, which is then skipped; an exception that it raises ends the reading."""


def refuse(error: BadLineError) -> None:
    """The `OnBad` that raises for every bad line."""
    raise error


def seconds_in(value: object) -> float | None:
    """A recorded time, None for what is no number. Raises `ValueError` or `OverflowError` for one that is no time."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a time")
    return float(value)


def lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(place, bytes) of every line that is not blank, of a file that may be compressed with gzip.

    Raises `ConfigurationError` if the file cannot be read.
    """
    with opened(path) as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
        except CUT_OR_DAMAGED as error:
            raise ConfigurationError(f"{path}: cannot be read to its end: {error}") from None


def opened(path: Path) -> IO[bytes]:
    """The file at `path`, decompressed if gzip wrote it. Raises `ConfigurationError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        return cast(IO[bytes], gzip.open(path, "rb")) if compressed else path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None


def json_object(line: bytes, place: str) -> dict[str, Any]:
    """The JSON object of a line. Raises `BadLineError`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLineError(place, f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadLineError(place, "not a JSON object")
    return value


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and its place; `at` in seconds since 1970, if known.

    `said` is false for an assistant's message that the model did not write, such as a demonstration.
    """

    message: Message
    place: str
    at: float | None = None
    said: bool = True


def calls_of(turns: Iterable[Turn], labels: Labels) -> Iterator[RecordedCall]:
    """Every message that the model wrote, as the answer to the messages before it.

    Such files name no answers: one is known by all that was said up to it.
    """
    before: list[Message] = []
    said = hashlib.sha256()
    for turn in turns:
        message = turn.message
        said.update(json.dumps(message).encode())
        if message["role"] == "assistant" and turn.said and (message.get("content") or message.get("tool_calls")):
            yield RecordedCall(turn.place, labels, list(before), message, created_at=turn.at, id=said.hexdigest())
        before.append(message)


def records(path: Path, on_bad: OnBad) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of every line. The last line may be in the middle of being written; then it is left out."""
    for place, line in lines(path):
        try:
            record = json_object(line, place)
        except BadLineError as error:
            if line.endswith(b"\n"):
                on_bad(error)
        else:
            yield place, record


def moment(value: Any) -> float | None:
    """Seconds since 1970, of an ISO 8601 time or a number of milliseconds."""
    try:
        milliseconds = seconds_in(value)
        return datetime.fromisoformat(str(value)).timestamp() if milliseconds is None else milliseconds / 1000
    except (ValueError, OverflowError):
        return None


def answer(text: str, thoughts: str = "", tool_calls: Iterable[Message] = ()) -> Message:
    """An assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls := list(tool_calls):
        message["tool_calls"] = calls
    return message


def tool_call(id: Any, name: Any, arguments: Any) -> Message:
    """A call of a function, with `arguments` as JSON text or a value; text that is no object becomes `input`."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else {"input": arguments}
    elif not isinstance(arguments, Mapping):
        arguments = {} if arguments is None else {"input": arguments}
    function = {"name": str(name), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": str(id), "type": "function", "function": function}


def tool_result(id: Any, content: str) -> Message:
    return {"role": "tool", "tool_call_id": str(id), "content": content}


def text_of(content: Any) -> str:
    """The text of a message's content: a string, or parts of which those with text count; others are named."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return "\n".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else f"[{part.get('type')}]"
