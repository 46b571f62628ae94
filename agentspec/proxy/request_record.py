"""One request and what became of it: filled in on the way, then logged and counted once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from starlette.types import Message, Scope, Send

from agentspec.types import Speculation, Usage

_KEY = "agentspec.exchange"


@dataclass(slots=True)
class Exchange:
    """`model` stays None until it is known to be a configured one, so that no text of a client's is ever logged.

    `strategy` is a header that names the strategy and its knobs, and whether the answer may differ by it.
    """

    request_id: str
    method: str
    route: str = "unknown"
    tenant: str | None = None
    model: str | None = None
    status: int = 0
    outcome: str = "ok"
    error: str | None = None
    stream: bool = False
    usage: Usage | None = None
    speculation: Speculation | None = None
    strategy: tuple[bytes, str] | None = None
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    body_begun: bool = False
    body_ended: bool = False

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        return cast(Exchange, scope[_KEY])

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def token_arrived(self) -> None:
        """Note the time of the first token; later calls do nothing."""
        if self.first_token is None:
            self.first_token = self.seconds

    def sending(self, send: Send) -> Send:
        """`send`, which notes the status and puts the request id on the answer."""

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status, self.body_begun = message["status"], True
                message["headers"] = [*message.get("headers", ()), *self._headers()]
            await send(message)
            self.body_ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        return watched

    def _headers(self) -> Iterator[tuple[bytes, bytes]]:
        yield b"x-request-id", self.request_id.encode()
        if self.strategy is not None:
            name, value = self.strategy
            yield name, value.encode()
