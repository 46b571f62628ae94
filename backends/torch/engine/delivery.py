"""Carries answers from the computing thread to an event loop, which is woken once for all that has come meanwhile.

Of several answers to one request the first reads the prompt for all, and the last to end has the totals of all.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from agentspec.backends.torch.engine.sequence import EngineRequest
from agentspec.protocol.speculation import summed
from agentspec.types import Delta, Speculation, Usage

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


@dataclass(slots=True)
class Choices:
    """Several answers to one request, `total` in all: gives each delta its index and sums up the usage of all. The
    prompt's tokens are counted once.
    """

    total: int
    _usages: list[Usage] = field(default_factory=list)
    _speculations: list[Speculation] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self._usages) == self.total

    def add(self, delta: Delta, index: int) -> Delta:
        """Label a delta with its choice `index`. Only the delta that ends the last choice carries the totals."""
        if delta.finish_reason is None:
            return replace(delta, index=index)
        self._usages.append(delta.usage or Usage())
        self._speculations += [delta.speculation] if delta.speculation else []
        usage = _usage(self._usages) if self.done else None
        speculation = summed(self._speculations) if self.done else None
        return replace(delta, index=index, usage=usage, speculation=speculation)


def _usage(all: list[Usage]) -> Usage:
    predicted = all[0].accepted_prediction_tokens is not None
    return Usage(
        prompt_tokens=all[0].prompt_tokens,
        completion_tokens=sum(one.completion_tokens for one in all),
        cached_tokens=min(one.cached_tokens for one in all),
        accepted_prediction_tokens=sum(one.accepted_prediction_tokens or 0 for one in all) if predicted else None,
        rejected_prediction_tokens=sum(one.rejected_prediction_tokens or 0 for one in all) if predicted else None,
    )
