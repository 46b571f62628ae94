"""Sends a stream in pieces of equal length at a constant rate.

The sizes and times of a stream's events tell who reads the network, TLS or not, where drafts were accepted, and thereby
what was said before (Wei et al. 2024, "When Speculation Spills Secrets", arXiv 2411.01076). Constant-rate sending hides
it as long as the rate is one that the model keeps without drafts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import anyio

from agentspec.types import Delta

HEAD_START = 2  # ticks that the model is ahead before the first piece is sent: uneven steps then leave no gaps
MOST_HELD = 1 << 16  # characters that wait to be sent before no more are generated
_THOUGHT = ("reasoning", "reasoning_content")  # one text under two names


@dataclass(slots=True)
class ChoicePieces:
    """What one choice has left to send: runs of text or of thoughts, which may be cut anywhere, and whole deltas."""

    index: int
    pieces: deque[Delta] = field(default_factory=deque)
    end: Delta | None = None
    ended: bool = False

    def add(self, delta: Delta) -> None:
        last = self.pieces[-1] if self.pieces else None
        if last is not None and _divisible(last) and _kind(last) == _kind(delta):
            self.pieces[-1] = _piece(delta, _text(last) + _text(delta))
        else:
            self.pieces.append(delta)

    def take(self, characters: int, *, complete: bool) -> Delta | None:
        """The next piece: `characters` long unless the run ends sooner, as the last one does once the answer is
        `complete`; None while it is not known how the run goes on.
        """
        if not self.pieces:
            return None
        first = self.pieces[0]
        if not _divisible(first):
            return self.pieces.popleft()
        text = _text(first)
        if len(text) > characters:
            self.pieces[0] = _piece(first, text[characters:])
            return _piece(first, text[:characters])
        if len(text) == characters or len(self.pieces) > 1 or self.end is not None or complete:
            return self.pieces.popleft()
        return None


class Pacer:
    """Cuts the deltas of an answer into pieces of `characters` and gives out one of each choice a tick.

    The pieces depend on the answer alone and not on how it arrived, except that deltas with log-probabilities, tool
    calls or token ids (if `token_ids` are sent) are passed on as they are, one a tick.
    """

    def __init__(self, characters: int, *, token_ids: bool = False) -> None:
        self._characters = characters
        self._token_ids = token_ids
        self._choices: dict[int, ChoicePieces] = {}
        self._totals = Delta()
        self.complete = False  # the answer: no delta follows

    @property
    def begun(self) -> bool:
        return bool(self._choices)

    @property
    def finished(self) -> bool:
        return self.complete and all(one.ended or not (one.pieces or one.end) for one in self._choices.values())

    @property
    def held(self) -> int:
        """Characters that wait to be sent."""
        return sum(len(_text(piece)) for one in self._choices.values() for piece in one.pieces)

    def add(self, delta: Delta) -> None:
        choice = self._choices.setdefault(delta.index, ChoicePieces(delta.index))
        self._totals = replace(
            self._totals,
            usage=delta.usage or self._totals.usage,
            speculation=delta.speculation or self._totals.speculation,
        )
        rest = replace(delta, finish_reason=None, stop_reason=None, usage=None, speculation=None)
        if not self._token_ids:
            rest = replace(rest, token_ids=())
        if rest != Delta(index=delta.index):
            choice.add(rest)
        if delta.finish_reason is not None:
            choice.end = Delta(finish_reason=delta.finish_reason, stop_reason=delta.stop_reason, index=delta.index)

    def tick(self) -> list[Delta]:
        """What is sent now, one delta for each choice that has not ended. An empty delta stands for filling."""
        return [self._next(choice) for choice in self._choices.values() if not choice.ended]

    def _next(self, choice: ChoicePieces) -> Delta:
        piece = choice.take(self._characters, complete=self.complete)
        if piece is not None:
            return piece
        if choice.pieces or choice.end is None:
            return Delta(index=choice.index)
        last = all(one.ended for one in self._choices.values() if one is not choice)
        if last and not self.complete:
            return Delta(index=choice.index)
        choice.ended = True
        return (
            replace(choice.end, usage=self._totals.usage, speculation=self._totals.speculation) if last else choice.end
        )


async def paced(
    deltas: AsyncGenerator[Delta], seconds: float, characters: int, *, token_ids: bool = False
) -> AsyncGenerator[Delta]:
    """Yield the answer in pieces of `characters`, one of each choice every `seconds`; an empty delta is filling.

    What `deltas` raises is raised after the pieces that came before. Closes `deltas` on the way out.
    """
    pacer, loop = Pacer(characters, token_ids=token_ids), asyncio.get_running_loop()
    arrived = asyncio.Event()
    reading = asyncio.create_task(_read(deltas, pacer, arrived, seconds))
    try:
        await arrived.wait()
        due = loop.time() + HEAD_START * seconds
        while pacer.begun and not pacer.finished:
            await asyncio.sleep(due - loop.time())
            for delta in pacer.tick():
                yield delta
            due = max(due + seconds, loop.time())  # a client that was slow to read gets no burst
        await reading
    finally:
        reading.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait((reading,))


async def _read(deltas: AsyncIterator[Delta], pacer: Pacer, arrived: asyncio.Event, seconds: float) -> None:
    """Hand every delta to `pacer`, and wait where it holds enough."""
    try:
        async with aclosing(deltas):  # type: ignore[type-var]
            async for delta in deltas:
                pacer.add(delta)
                arrived.set()
                while pacer.held > MOST_HELD:
                    await asyncio.sleep(seconds)
    finally:
        pacer.complete = True
        arrived.set()


def _divisible(delta: Delta) -> bool:
    return bool(_text(delta)) and delta == _piece(delta, _text(delta))


def _kind(delta: Delta) -> tuple[str, ...]:
    """The fields that a run of text is sent in; "whole" for a delta that is no such run."""
    if not _divisible(delta):
        return ("whole",)
    return tuple(delta.extra) or ("text",)


def _text(delta: Delta) -> str:
    thought = next((delta.extra[name] for name in _THOUGHT if isinstance(delta.extra.get(name), str)), "")
    return delta.text or thought


def _piece(like: Delta, text: str) -> Delta:
    """A delta with `text` in the fields where `like` has its own."""
    if like.text:
        return Delta(text=text, index=like.index)
    return Delta(extra={name: text for name in like.extra if name in _THOUGHT}, index=like.index)
