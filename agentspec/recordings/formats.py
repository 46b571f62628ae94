"""Recognises the format of a file or folder of recorded model calls, and reads it. docs/cache.md describes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError
from agentspec.recordings.agents import claude_code, codex
from agentspec.recordings.calls import (
    CUT_OR_DAMAGED,
    BadLineError,
    OnBad,
    RecordedCall,
    json_object,
    lines,
    opened,
    refuse,
)
from agentspec.recordings.logs import Traces, parse_chat, parse_log


class Format(StrEnum):
    """The format of a file. This module recognises `checkpoints` and `export` but does not read them."""

    trace = "trace"
    log = "log"
    chat = "chat"
    claude_code = "claude-code"
    codex = "codex"
    checkpoints = "checkpoints"
    export = "export"


# In this order: a format is recognised by keys that those below may have beside others.
_SIGNS = {
    Format.export: ("agentspec_export",),
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
    raise ConfigurationError(f"{path}: no format that is known here; name it with --format ({', '.join(Format)})")


def _recognised(head: bytes, place: str) -> Format | None:
    if head.startswith(b"SQLite format 3\0"):
        return Format.checkpoints
    try:
        record = json_object(head, place)
    except BadLineError:
        return None
    for format_, keys in _SIGNS.items():
        if any(key in record for key in keys):
            return format_
    untyped = "id" in record and "instructions" in record  # Codex before its lines had types
    return Format.codex if untyped or record.get("type") in _CODEX else None


def files_of(path: Path, unknown: Callable[[Path], None]) -> Iterator[Path]:
    """`path`, or all files below that folder whose format is known, sorted; links are not followed.

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


def names_of(paths: Sequence[Path]) -> list[str]:
    """The name of each file, with as many of its folders as tell it from the others.

    Raises `ConfigurationError` for a file that is given twice.
    """
    parts = [path.absolute().parts for path in paths]
    ends = Counter(whole[-length:] for whole in parts for length in range(1, len(whole) + 1))
    if twice := [str(path) for path, whole in zip(paths, parts, strict=True) if ends[whole] > 1]:
        raise ConfigurationError(f"{twice[0]} is given twice; name each file once")
    lengths = (next(length for length in range(1, len(one) + 1) if ends[one[-length:]] == 1) for one in parts)
    return [str(Path(*one[-length:])) for one, length in zip(parts, lengths, strict=True)]


def read(path: Path, format_: Format, on_bad: OnBad = refuse) -> Iterator[RecordedCall]:
    """The calls of a file of any format but checkpoints and exports, in order."""
    sessions: dict[Format, Callable[[], Iterator[RecordedCall]]] = {
        Format.claude_code: lambda: claude_code.read(path, on_bad),
        Format.codex: lambda: codex.read(path, on_bad),
    }
    if format_ not in sessions:
        yield from _lines(path, format_, on_bad)
        return
    try:
        yield from sessions[format_]()
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
