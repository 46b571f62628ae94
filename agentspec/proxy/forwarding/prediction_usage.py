"""Adds to the usage of a forwarded answer how much of the request's prediction appeared in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from agentspec.backends.openai.prediction import PredictionCounter
from agentspec.proxy.body.budget import INLINE_BYTES
from agentspec.proxy.body.json_object import set_values

_DETAILS = "completion_tokens_details"
_ACCEPTED, _REJECTED = "accepted_prediction_tokens", "rejected_prediction_tokens"


class PredictionUsage:
    """Sets the prediction counts in the `usage` of one answer of chats or completions, as `counter` finds them.

    Every other byte of the answer is kept, and all of them where the upstream counts by itself.
    """

    def __init__(self, counter: PredictionCounter) -> None:
        self._counter = counter

    async def whole(self, content: bytes) -> bytes:
        """A whole answer with its counts."""
        answer = _object(content) if len(content) <= INLINE_BYTES else await asyncio.to_thread(_object, content)
        self._read(answer)
        return await self._with_counts(content, answer)

    async def events(self, events: bytes) -> bytes:
        """The next whole events of a stream; the chunk without choices that ends it gets the counts."""
        lines = events.splitlines(keepends=True)
        return b"".join([await self._line(line) for line in lines])

    async def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:"):
            return line
        data = line[5:].strip()
        chunk = _object(data)
        self._read(chunk)
        if chunk.get("choices"):  # its usage, if there is one, is not the last
            return line
        start = line.index(data)
        return line[:start] + await self._with_counts(data, chunk) + line[start + len(data) :]

    def _read(self, answer: Mapping[str, Any]) -> None:
        choices = answer.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                index = choice.get("index")
                self._counter.add(_text(choice), index if isinstance(index, int) else 0)

    async def _with_counts(self, data: bytes, answer: dict[str, Any]) -> bytes:
        usage = answer.get("usage")
        details = (usage.get(_DETAILS) or {}) if isinstance(usage, dict) else None
        if not isinstance(usage, dict) or not isinstance(details, dict) or details.get(_ACCEPTED) is not None:
            return data
        counts = await self._counter.counts()
        if counts is None:
            return data
        accepted, rejected = counts
        details = {**details, _ACCEPTED: accepted, _REJECTED: rejected}
        return set_values(data, answer, {"usage": {**usage, _DETAILS: details}})


def _text(choice: Mapping[str, Any]) -> str:
    message = choice.get("delta") or choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


def _object(data: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        value = json.loads(data)
        return value if isinstance(value, dict) else {}
    return {}
