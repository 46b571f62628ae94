"""`/fleet`: how the servers of pools are, and draining them. For operators."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from agentspec.backends.openai.vllm_metrics import samples
from agentspec.backends.pool.fleet import Fleet
from agentspec.errors import InvalidRequestError
from agentspec.proxy.body.json_object import parse_object
from agentspec.proxy.logs import logger
from agentspec.proxy.streaming.sending import json_response
from agentspec.runtime import Runtime

MAX_BODY_BYTES = 4096
_SUMS = {"agentspec_member_in_flight": "in_flight"} | {
    f"agentspec_member_{name}_total": name for name in ("calls", "retries", "failures", "ejections")
}
"""The metrics that add up over processes."""
DrainNotice = Callable[[str, bool], None]


class FleetPages:
    """The routes. `spread` tells the gateway's other processes which member is drained, or no longer; `scrape` returns
    the metrics of all.
    """

    def __init__(self, runtime: Runtime, spread: DrainNotice | None, scrape: Callable[[], Awaitable[bytes]]) -> None:
        self._runtime, self._spread, self._scrape = runtime, spread, scrape

    async def status(self, request: Request) -> Response:
        """The members: states and loads as this process sees them, calls of all processes."""
        fleet = self._runtime.fleet
        members = {} if fleet is None else {sample.member: asdict(sample) for sample in fleet.samples()}
        for name, labels, value in samples((await self._scrape()).decode(), tuple(_SUMS)):
            if name in _SUMS and labels["member"] in members:
                members[labels["member"]][_SUMS[name]] = int(value)
        return json_response({"members": list(members.values())})

    async def drain(self, request: Request) -> Response:
        """Send no new calls to a member, or to all of a backend; those that run go on."""
        return await self._switch(request, on=True)

    async def resume(self, request: Request) -> Response:
        """Send it calls again."""
        return await self._switch(request, on=False)

    async def _switch(self, request: Request, *, on: bool) -> Response:
        name = await _name(request)
        fleet = self._fleet()
        members = fleet.drain(name, on=on)
        if self._spread is not None:
            for one in dict.fromkeys([name, *members]):  # other processes may not have found all members of a backend
                self._spread(one, on)
        logger.info("member drained" if on else "member resumed", member=name)
        return json_response({"drained": fleet.drained()})

    def _fleet(self) -> Fleet:
        if self._runtime.fleet is None:
            raise InvalidRequestError("this gateway has no pool of servers")
        return self._runtime.fleet


async def _name(request: Request) -> str:
    """The `name` in the body. Raises `InvalidRequestError`."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise InvalidRequestError(f"the body is longer than {MAX_BODY_BYTES} bytes")
    name = parse_object(body).get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError('name must be a member or a backend: {"name": "..."}', param="name")
    return name
