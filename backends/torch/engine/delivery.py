"""Carries answers from the computing thread to an event loop, which is woken once for all that has come meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

from agentspec.backends.torch.engine.sequence import EngineRequest
from agentspec.types import Delta

Item = tuple[EngineRequest, Delta | Exception]


class Inbox:
    """The deltas of one request's choices that the loop has not read yet: no more than one for each token.

    Any thread may call `put`. Only the loop that made it may call `get`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._woken = False  # the loop was given a callback that it has not answered by `get` yet
        self._items: list[Item] = []
        self._lock = threading.Lock()

    def put(self, request: EngineRequest, item: Delta | Exception) -> bool:
        """Add an item of a choice. Returns False if the loop is closed, so that nothing will read it."""
        with self._lock:
            self._items.append((request, item))
            woken, self._woken = self._woken, True
        if woken:
            return not self._loop.is_closed()
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # closed
            return False
        return True

    async def get(self) -> list[Item]:
        """Wait for items; the deltas of a choice come as one."""
        await self._arrived.wait()
        self._arrived.clear()
        with self._lock:
            self._woken = False
            items, self._items = self._items, []
        return joined(items)


def joined(items: Iterable[Item]) -> list[Item]:
    """The items with the deltas of each choice in one, up to the first error, which ends the request."""
    deltas, errors = dict[EngineRequest, list[Delta]](), list[Item]()
    for request, item in items:
        if isinstance(item, Exception):
            errors.append((request, item))
            break
        deltas.setdefault(request, []).append(item)
    return [*((request, join_deltas(parts)) for request, parts in deltas.items()), *errors]


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """One delta that adds what `deltas` of one choice add one after another."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        token_sources=tuple(entry for delta in deltas for entry in delta.token_sources),
        prompt=next((delta.prompt for delta in deltas if delta.prompt is not None), None),
    )
