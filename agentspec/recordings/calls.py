"""What readers of recorded model calls share: the calls, bad lines, and files of lines.

Lines that violate their format are reported with file and line number; the caller decides what to do with them.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from agentspec.errors import ConfigurationError
from agentspec.types import Labels, Message


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
        raise ValueError(f"{value} is no time")
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


def json_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of every line of a file. Raises `BadLineError` for one that is no object, and as `lines`."""
    return ((place, json_object(line, place)) for place, line in lines(path))


def json_object(line: bytes, place: str) -> dict[str, Any]:
    """The JSON object of a line. Raises `BadLineError`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLineError(place, f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadLineError(place, "not a JSON object")
    return value
