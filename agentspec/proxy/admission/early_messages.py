"""Listens to a client whose request waits for its turn, and keeps what it sends meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from agentspec.errors import OverloadedError

MOST_BYTES = 64 << 10  # of a body that are kept; the rest stays with the server, which then stops reading


class EarlyMessages:
    """The messages of one request that came before they were asked for. `receive` returns them first.

    Where the given `receive` refuses a message for want of memory, so does this one, behind those that are kept.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: deque[Message] = deque()
        self._refusal: OverloadedError | None = None

    async def receive(self) -> Message:
        if self._messages:
            return self._messages.popleft()
        if self._refusal is not None:
            raise self._refusal
        return await self._receive()

    async def listen_until(self, turn: asyncio.Future[None], seconds: float | None) -> None:
        """Wait for `turn`, and raise what it raises. Raises `ClientDisconnect` if the client leaves before,
        `OverloadedError` if there is no memory for what it sends, and `TimeoutError` after `seconds`.
        """
        listening = asyncio.create_task(self._listen())
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wait((turn, listening), return_when=asyncio.FIRST_COMPLETED)
                if not turn.done() and listening.result():
                    raise self._refusal or ClientDisconnect()
                await asyncio.wait((turn,))
            turn.result()
        finally:
            listening.cancel()
            await asyncio.wait((listening,))

    async def _listen(self) -> bool:
        """Keep messages until enough of the body is kept. Returns True if there is no use in waiting any longer: the
        client has disconnected, or what it sent was refused.
        """
        kept = 0
        while kept < MOST_BYTES:
            try:
                message = await self._receive()
            except OverloadedError as error:
                self._refusal = error
                return True
            self._messages.append(message)
            if message["type"] == "http.disconnect":
                return True
            kept += len(message.get("body", b""))
        return False
