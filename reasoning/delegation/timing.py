"""Time that models took, without that of a client who listens slowly; and what a strategy saves by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
FADING = 0.9  # what is left of older figures with each answer


@dataclass(slots=True)
class Stopwatch:
    """Runs while work is awaited, and stands still while its results are passed on."""

    seconds: float = 0.0

    async def limited(self, limit: float, work: Awaitable[T]) -> T:
        """What `work` gives. Raises `TimeoutError` once this has run for `limit` seconds in all."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(limit - self.seconds):
                return await work
        finally:
            self.seconds += time.perf_counter() - began

    async def timed(self, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """The items, each awaited with the stopwatch running."""
        async with aclosing(items):
            while True:
                began = time.perf_counter()
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
                finally:
                    self.seconds += time.perf_counter() - began
                yield item


@dataclass(slots=True)
class BaseThroughput:
    """How fast the base model writes, from its own steps and answers; newer ones count more."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """What it wrote of one answer."""
        if tokens:
            self.tokens = FADING * self.tokens + tokens
            self.seconds = FADING * self.seconds + seconds

    def seconds_saved(self, tokens: int, seconds: float) -> float:
        """The seconds that `tokens` would have taken it beyond `seconds`; 0 before it wrote anything."""
        return tokens * self.seconds / self.tokens - seconds if self.tokens else 0.0
