"""`/fleet`: how the servers of pools are, and draining them. For operators."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from agentspec.backends.pool.fleet import Fleet
from agentspec.errors import InvalidRequestError
from agentspec.proxy.body.reading import parse_object
from agentspec.proxy.logs import logger
from agentspec.proxy.streaming.sending import json_response
from agentspec.runtime import Runtime

MAX_BODY_BYTES = 4096


class FleetPages:
    """The routes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def status(self, request: Request) -> Response:
        """The members: their states, loads and calls."""
        fleet = self._runtime.fleet
        return json_response({"members": [] if fleet is None else [asdict(sample) for sample in fleet.samples()]})

    async def drain(self, request: Request) -> Response:
        """Send no new calls to a member, or to all of a backend; those that run go on."""
        return await self._switch(request, on=True)

    async def resume(self, request: Request) -> Response:
        """Send it calls again."""
        return await self._switch(request, on=False)

    async def _switch(self, request: Request, *, on: bool) -> Response:
        name = await _name(request)
        fleet = self._fleet()
        fleet.drain(name, on=on)
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
