"""Conversations as agents record them: turns in order, and the calls that the model's own turns were."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from agentspec.recordings.calls import (
    BadLineError,
    OnBad,
    RecordedCall,
    json_object,
    lines,
    seconds_in,
)
from agentspec.types import Labels, Message


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and its place; `at` in seconds since 1970, if known.

    `finished` tells that no limit cut it. `said` is false for an assistant's message that the model did not write, such
    as a demonstration.
    """

    message: Message
    place: str
    at: float | None = None
    finished: bool = True
    said: bool = True


def calls_of(turns: Iterable[Turn], labels: Labels) -> Iterator[RecordedCall]:
    """Every message that the model wrote, as the answer to the messages before it."""
    before: list[Message] = []
    for turn in turns:
        message = turn.message
        if message["role"] == "assistant" and turn.said and (message.get("content") or message.get("tool_calls")):
            yield RecordedCall(turn.place, labels, list(before), message, finished=turn.finished, created_at=turn.at)
        before.append(message)


def records(path: Path, on_bad: OnBad) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of every line. The last line may be in the middle of being written; then it is left out."""
    held: tuple[str, bytes] | None = None
    for place, line in lines(path):
        if held is not None:
            yield from _record(*held, on_bad)
        held = place, line
    if held is not None and (held[1].endswith(b"\n") or _is_whole(held[1])):
        yield from _record(*held, on_bad)


def _record(place: str, line: bytes, on_bad: OnBad) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        record = json_object(line, place)
    except BadLineError as error:
        on_bad(error)
    else:
        yield place, record


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


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
