"""How many requests are inside, and whether new ones may come in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentspec.errors import OverloadedError, ShuttingDownError


class Gate:
    """Bounds the requests being answered. `close` lets those inside finish and turns new ones away."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.inside = 0
        self.closed = False

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Hold one place. Raises `ShuttingDownError` or `OverloadedError` at once instead of waiting."""
        if self.closed:
            raise ShuttingDownError("the server is shutting down; send the request elsewhere or later")
        if self.inside >= self._limit:
            raise OverloadedError(f"{self._limit} requests are being answered already (server.max_concurrent)")
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def close(self) -> None:
        self.closed = True
