"""Sets fields of a forwarded answer, whole or streamed, and leaves all its other bytes as they are."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from agentspec.proxy.body.budget import INLINE_BYTES
from agentspec.proxy.body.json_object import set_values

MAX_WHOLE = 2 << 20  # bytes of a whole answer; larger ones are left as they are


class AnswerEdits(ABC):
    """Follows one answer of chats or completions, and says which of its fields to set."""

    @abstractmethod
    async def edits(self, answer: dict[str, Any], *, whole: bool) -> dict[str, Any]:
        """The top-level fields to set in a `whole` answer, or in a chunk of a stream. Called for each in order."""
        ...

    async def whole(self, content: bytes) -> bytes:
        """A whole answer with what is set in it. One beyond `MAX_WHOLE` is not read."""
        if len(content) > MAX_WHOLE:
            return content
        answer = _parsed(content) if len(content) <= INLINE_BYTES else await asyncio.to_thread(_parsed, content)
        return await self._edited(content, answer, whole=True)

    async def events(self, events: bytes) -> bytes:
        """The next whole events of a stream, with what is set in them."""
        lines = events.splitlines(keepends=True)
        return b"".join([await self._line(line) for line in lines])

    async def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:"):
            return line
        data = line[5:].strip()
        start = line.index(data)
        return line[:start] + await self._edited(data, _parsed(data), whole=False) + line[start + len(data) :]

    async def _edited(self, data: bytes, answer: dict[str, Any], *, whole: bool) -> bytes:
        added = await self.edits(answer, whole=whole) if answer else {}
        with suppress(TypeError, ValueError, RecursionError):  # what JSON cannot write again
            return set_values(data, answer, added) if added else data
        return data


def choice_text(choice: Mapping[str, Any]) -> str:
    """The text of a choice, or of a piece of one."""
    message = choice.get("delta") or choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


def answer_object(value: Any) -> dict[str, Any]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _parsed(data: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        return answer_object(json.loads(data.decode()))  # bytes might also be read as UTF-16
    return {}
