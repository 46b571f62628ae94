"""Listens to a client whose request waits for its turn, and keeps what it sends meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from agentspec.errors import OverloadedError
from agentspec.proxy.body.budget import BodyAccount

MOST_BYTES = 64 << 10  # of a body that are kept; the rest stays with the server, which then stops reading


class EarlyMessages:
    """The messages of one request that came before they were asked for. `receive` returns them first.

    While they are kept here, `account` holds their bytes.
    """

    def __init__(self, receive: Receive, account: BodyAccount | None = None) -> None:
        self._receive = receive
        self._account = account
        self._messages: deque[tuple[Message, int]] = deque()
        self._refusal: OverloadedError | None = None

    async def receive(self) -> Message:
        if not self._messages:
            return await self._receive()
        message, held = self._messages.popleft()
        if self._account is not None:
            self._account.hold(-held)
        return message

    async def listen_until(self, turn: asyncio.Future[None], seconds: float) -> None:
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
        """Keep messages until enough of the body is kept. Returns True if the wait is over: the client disconnected, or
        its message found no room.
        """
        kept = 0
        while kept < MOST_BYTES:
            message = await self._receive()
            size = len(message.get("body", b""))
            self._messages.append((message, self._hold(size)))
            if message["type"] == "http.disconnect" or self._refusal is not None:
                return True
            kept += size
        return False

    def _hold(self, size: int) -> int:
        """Account for a message that came, whether there is room or not; returns the bytes that the account holds."""
        if self._account is None:
            return 0
        try:
            self._account(size)
        except OverloadedError as error:
            self._refusal = error
            return 0
        return size
