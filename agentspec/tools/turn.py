"""A turn of the model that has begun and not ended."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from agentspec.tools.flights import Flight, Launch
from agentspec.tools.prediction.model import CallForecast

Start = Callable[[Launch], Flight]


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@dataclass(slots=True)
class AgentTurn:
    """What was predicted of a turn, and when tools were named in it (monotonic, in seconds).

    `start` starts a tool, of which there are `places` left; None once the turn calls a tool that may change something.
    Tools run in the context, and as tasks of the loop, in which the turn began.
    """

    start: Start | None
    places: int
    loop: asyncio.AbstractEventLoop | None = None
    began: float = field(default_factory=time.monotonic)
    forecast: CallForecast | None = None
    named: dict[str, float] = field(default_factory=dict)
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    def in_loop(self, do: Callable[[], None]) -> None:
        """Do something in the turn's loop, where it has one: now, or soon if this is another thread."""
        if self.loop is None or self.loop is _running_loop():
            do()
        else:
            with suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(do)

    def started(self, launch: Launch) -> Flight:
        """Start a tool as at the turn's beginning. Raises `RuntimeError` where none may start any more."""
        if self.start is None:
            raise RuntimeError
        return self.context.copy().run(self.start, launch)
