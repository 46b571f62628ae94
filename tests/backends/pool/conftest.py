"""Pools of servers that are functions, in loops whose clock jumps: nothing sleeps, and every run is the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx

from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import FleetSettings, OpenAISettings
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.types import GenerateRequest
from tests.conftest import JumpingLoop, running_in

CHAT = "/v1/chat/completions"
ANSWER = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
PIECE = b'data: {"choices": [{"index": 0, "delta": {"content": "h"}}]}\n\n'
REQUEST = GenerateRequest(model="m", messages=({"role": "user", "content": "hi"},))
REFUSED = httpx.ConnectError("refused")


@dataclass
class Server:
    """A server that answers `status` or raises `error`; `seen` are its requests, as (time, path)."""

    name: str
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None
    delay: float = 0.0
    cuts: bool = False
    """Whether it sends a part of an answer alone."""
    paths: dict[str, Callable[[], Awaitable[httpx.Response]]] = field(default_factory=dict)
    seen: list[tuple[float, str]] = field(default_factory=list)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.seen.append((asyncio.get_running_loop().time(), path))
        if path in self.paths:
            return await self.paths[path]()
        if self.delay:
            await asyncio.sleep(self.delay)
        if self.error is not None:
            raise self.error
        if self.cuts:
            return httpx.Response(200, content=PIECE, headers={"content-type": "text/event-stream"})
        return httpx.Response(self.status, content=json.dumps(ANSWER), headers=self.headers)

    def times(self, path: str = CHAT) -> list[float]:
        return [at for at, one in self.seen if one == path]


@dataclass
class Pool:
    """The model `m` of a runtime, answered by several servers."""

    runtime: Runtime

    async def ask(self, **fields: Any) -> str:
        request = GenerateRequest(**{"model": "m", "messages": REQUEST.messages, **fields})
        async with aclosing(self.runtime.route("m").backend.generate(request)) as deltas:
            return "".join([delta.text async for delta in deltas])

    async def outcome(self) -> str:
        """The answer, or the name of the error."""
        try:
            return await self.ask()
        except Exception as error:
            return type(error).__name__

    @property
    def members(self) -> dict[str, Any]:
        """A sample of each server, by name."""
        assert self.runtime.fleet is not None
        return {sample.member: sample for sample in self.runtime.fleet.samples()}

    def states(self) -> list[str]:
        return [sample.state for sample in self.members.values()]

    async def begin(self) -> None:
        assert self.runtime.fleet is not None
        await self.runtime.fleet.begin()


def make(
    *servers: Server, placement: Any = "round_robin", kind: Any = "other", probe: bool = False, **fleet: Any
) -> Pool:
    settings = {
        one.name: OpenAISettings(base_url=f"http://{one.name}/v1", server_kind=kind, probe=probe)  # type: ignore[arg-type]
        for one in servers
    }
    model = ModelSettings(backends=tuple(settings), placement=placement)
    backends = {
        one.name: OpenAIBackend(settings[one.name], name=one.name, transport=httpx.MockTransport(one))
        for one in servers
    }
    all_of_it = Settings(backends=settings, models={"m": model}, fleet=FleetSettings(**fleet))  # type: ignore[arg-type]
    runtime = Runtime(all_of_it, backends=backends)  # type: ignore[arg-type]
    runtime.start()
    return Pool(runtime)


pytest_pyfunc_call = running_in(JumpingLoop)
