"""Measures the time that models take, without the time of slow clients, and the time that a strategy saves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
FADING = 0.9  # factor by which each answer reduces the weight of older figures


@dataclass(slots=True)
class Stopwatch:
    """Runs while a model's work is awaited, and stops while its results are passed on."""

    seconds: float = 0.0

    async def limited(self, limit: float, work: Awaitable[T]) -> T:
        """Await `work` and return its result. Raises `TimeoutError` once the watch has run `limit` seconds in all."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(limit - self.seconds):
                return await work
        finally:
            self.seconds += time.perf_counter() - began

    async def timed(self, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Yield the items; the stopwatch runs while each item is awaited."""
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
    """How fast the base model writes, measured on its own steps and answers; newer figures count more."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Record that the base model wrote `tokens` of one answer in `seconds`."""
        if tokens:
            self.tokens = FADING * self.tokens + tokens
            self.seconds = FADING * self.seconds + seconds

    def seconds_saved(self, tokens: int, seconds: float) -> float:
        """How many more seconds than `seconds` the base model would need for `tokens`; 0 before it wrote anything."""
        return tokens * self.seconds / self.tokens - seconds if self.tokens else 0.0
