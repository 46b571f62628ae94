"""Pools of servers that are functions, in loops whose clock jumps: nothing sleeps, and every run is the same."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import pytest

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.pool import Pool
from agentspec.backends.pool.servers import Servers
from agentspec.backends.settings import FleetSettings, OpenAISettings
from agentspec.placement import PlacementPolicy, RoundRobin
from tests.conftest import JumpingLoop

ANSWER = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}


@dataclass
class Server:
    """A server that answers `status` or raises `error`; `seen` are its requests, as (time, path)."""

    name: str
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None
    delay: float = 0.0
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
        return httpx.Response(self.status, content=json.dumps(ANSWER), headers=self.headers)

    def times(self, path: str = "/v1/chat/completions") -> list[float]:
        return [at for at, one in self.seen if one == path]


@dataclass
class Made:
    pool: Pool
    servers: list[Servers]


def make(
    *servers: Server,
    policy: PlacementPolicy | None = None,
    kind: str = "other",
    probe: bool = False,
    **fleet: Any,
) -> Made:
    """A pool of these servers, to be made and used in one loop, by whose clock it goes."""
    settings, targets = FleetSettings(**fleet), []
    for server in servers:
        own = OpenAISettings(base_url=f"http://{server.name}/v1", server_kind=kind, probe=probe)  # type: ignore[arg-type]
        backend = OpenAIBackend(own, name=server.name, transport=httpx.MockTransport(server))
        targets.append(Servers(server.name, own, settings, backend))
    clock = asyncio.get_running_loop().time
    wired = [(one, None) for one in targets]
    pool = Pool("m", wired, policy or RoundRobin(), settings, clock=clock, rng=random.Random(1))
    return Made(pool, targets)


@pytest.fixture
def make_pool() -> Callable[..., Made]:
    return make


@pytest.fixture
def server() -> type[Server]:
    return Server


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run asynchronous tests in virtual time."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True
