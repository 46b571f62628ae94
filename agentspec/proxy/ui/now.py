"""What the view *Now* shows: the last half hour of the gateway, and then its figures every two seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from agentspec.errors import OverloadedError
from agentspec.protocol.wire import encode, event
from agentspec.proxy.admission import Slots, until_disconnect
from agentspec.proxy.answer import EVENT_STREAM, RequestAnswer, piece
from agentspec.proxy.endpoint import Services
from agentspec.proxy.middleware import RecordedRoute
from agentspec.proxy.routes.pages import Pages
from agentspec.telemetry.history import POINTS

MOST_VIEWERS = 16
EVENT_SECONDS = 2.0


def now_routes(services: Services, pages: Pages) -> Iterator[RecordedRoute]:
    yield RecordedRoute("/ui/data/now", NowStream(pages, services.slots), "GET", "reads_metrics")


@dataclass(slots=True)
class NowStream:
    """A stream of events, each with the figures of `now`, and the `points` of the history that are new to the viewer.
    It ends with its viewer, or when the gateway drains.
    """

    pages: Pages
    slots: Slots
    viewers: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.viewers >= MOST_VIEWERS:
            raise OverloadedError(f"{MOST_VIEWERS} viewers watch this gateway already; close one, or try again later")
        gauge = self.pages.registry.in_flight
        self.viewers += 1
        gauge.dec()  # who watches is no load
        try:
            async with until_disconnect(receive):
                await self._send(RequestAnswer.of(scope))
        finally:
            gauge.inc()
            self.viewers -= 1

    async def _send(self, answer: RequestAnswer) -> None:
        history, seen = self.pages.history, 0
        await answer.send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        while not self.slots.closed:
            now, new = await history.now(), history.added - seen
            points = list(history.points)[-new:] if new else []
            seen += new
            shown = {"most": POINTS, "points": points, "now": now}
            await answer.send(piece(event(encode(shown))))
            await asyncio.sleep(EVENT_SECONDS)
        await answer.send({"type": "http.response.body", "body": b""})
