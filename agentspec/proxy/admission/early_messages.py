"""Listens to a client whose request waits for its turn, and keeps what it sends meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

MOST_BYTES = 64 << 10  # of a body that are kept; the rest stays with the server, which then stops reading


class EarlyMessages:
    """The messages of one request that came before they were asked for. `receive` returns them first."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: deque[Message] = deque()

    async def receive(self) -> Message:
        return self._messages.popleft() if self._messages else await self._receive()

    async def listen_until(self, turn: asyncio.Future[None], seconds: float | None) -> None:
        """Wait for `turn`, and raise what it raises. Raises `ClientDisconnect` if the client leaves before, and
        `TimeoutError` after `seconds`.
        """
        listening = asyncio.create_task(self._listen())
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wait((turn, listening), return_when=asyncio.FIRST_COMPLETED)
                if not turn.done() and listening.result():
                    raise ClientDisconnect
                await asyncio.wait((turn,))
            turn.result()
        finally:
            listening.cancel()
            await asyncio.wait((listening,))

    async def _listen(self) -> bool:
        """Keep messages until the client disconnects (true), or until enough of the body is kept (false)."""
        kept = 0
        while kept < MOST_BYTES:
            message = await self._receive()
            self._messages.append(message)
            if message["type"] == "http.disconnect":
                return True
            kept += len(message.get("body", b""))
        return False
