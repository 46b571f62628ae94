from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.errors import OverloadedError
from agentspec.proxy.admission.engine_places import EnginePlaces
from agentspec.settings.api_keys import ApiKey
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings, TenantLimits
from agentspec.telemetry.samples import TenantSample
from agentspec.testing import FakeBackend
from agentspec.types import Delta, GenerateRequest

KEYS = tuple(ApiKey(tenant=name, key_env="X") for name in ("a", "b"))


def places(takes: int = 4, **server: Any) -> EnginePlaces:
    backends = {
        "local": TorchSettings(max_active=takes - 1, max_queue=1),
        "up": OpenAISettings(base_url="http://up/v1"),  # type: ignore[arg-type]
    }
    return EnginePlaces(ServerSettings(api_keys=KEYS, **server), backends)


async def taken(found: EnginePlaces, tenant: str, most: int = 20) -> int:
    """How many places the tenant gets until it is refused."""
    for number in range(most):
        try:
            await found.enter("local", tenant).__aenter__()
        except OverloadedError as error:
            assert "max_queue" in error.message
            return number
    return most


@pytest.mark.anyio
async def test_an_engine_has_as_many_places_as_it_takes_and_an_upstream_any_number() -> None:
    found = places(queue_timeout=0)
    assert await taken(found, "a") == 4
    for _ in range(20):
        async with found.enter("up", "a"), found.enter("unheard of", "a"):
            pass
    counted = found.add_to([TenantSample("a", 24, 0, 3)])
    assert counted == [TenantSample("a", 24, 0, 4), TenantSample("b", 0, 0, 0)][: len(counted)]


@pytest.mark.anyio
async def test_reserved_places_are_the_same_part_of_an_engines() -> None:
    tenants = {"b": TenantLimits(reserved=50)}
    found = places(queue_timeout=0, max_concurrent=100, tenants=tenants)
    assert await taken(found, "a") == 2 and await taken(found, "b") == 2
    found = places(queue_timeout=0, max_concurrent=100, tenants=tenants)
    found.update(ServerSettings(api_keys=KEYS, queue_timeout=0))
    assert await taken(found, "a") == 4


@pytest.mark.anyio
async def test_who_waits_is_counted_as_waiting() -> None:
    found = places(queue_timeout=60)
    held = [found.enter("local", "a") for _ in range(4)]
    for one in held:
        await one.__aenter__()
    waiting = asyncio.create_task(found.enter("local", "b").__aenter__())
    await asyncio.sleep(0.01)
    counted = found.add_to([TenantSample("a", 4, 0, 0), TenantSample("b", 1, 0, 0)])
    assert counted == [TenantSample("a", 4, 0, 0), TenantSample("b", 0, 1, 0)]
    await held[0].__aexit__(None, None, None)
    await waiting


class Gated(FakeBackend):
    """Answers once it is told to. More than four at once are refused."""

    def __init__(self) -> None:
        super().__init__("fine", max_active=4)
        self.go = threading.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        async for delta in super().generate(request):
            while not self.go.is_set():
                await asyncio.sleep(0.01)
            yield delta


def test_the_engine_never_has_to_refuse_and_tenants_take_turns(
    gateway: Any, tmp_path: Path, until: Callable[..., None]
) -> None:
    """Thirty requests of one tenant stand before five of another at an engine that takes four."""
    for tenant in ("a", "b"):
        (tmp_path / tenant).write_text(f"key-of-{tenant}")
    keys = tuple(ApiKey(tenant=tenant, key_file=tmp_path / tenant) for tenant in ("a", "b"))
    backend = Gated()
    settings = Settings(
        server=ServerSettings(api_keys=keys, queue_timeout=60),
        backends={"local": TorchSettings(max_active=3, max_queue=1)},
        models={"m": ModelSettings(backend="local")},
    )
    running = gateway({"local": backend}, settings)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

    def post(tenant: str) -> int:
        headers = {"authorization": f"Bearer key-of-{tenant}"}
        return httpx.post(f"{running.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code

    with ThreadPoolExecutor(35) as threads:
        answers = [threads.submit(post, "a") for _ in range(30)]
        until(lambda: running.app.limiter.running == 30)
        answers += [threads.submit(post, "b") for _ in range(5)]
        until(lambda: running.app.limiter.running == 35)
        until(lambda: len(backend.requests) >= 4)  # those that got a place may still be on their way to the engine
        assert len(backend.requests) == 4
        backend.go.set()
        assert [one.result() for one in answers] == [200] * 35
    order = [request.tenant for request in backend.requests]
    last = max(place for place, tenant in enumerate(order) if tenant == "b")
    assert order[: last + 1].count("a") < 20, order
