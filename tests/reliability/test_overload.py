"""C7: five times as many requests as the gateway has slots for, and tenants that crowd each other out.

The gateway runs by a clock that jumps, so that a minute of overload takes seconds and every run is the same.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.proxy.app import create_app
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings, TenantLimits
from agentspec.testing import FakeBackend
from tests.proxy.conftest import key_files

pytestmark = pytest.mark.reliability

PLACES = 8
SECONDS = 0.16  # that each request holds its place
CAPACITY = PLACES / SECONDS
SECONDS_OF_LOAD = [1, pytest.param(60, marks=pytest.mark.long)]


@dataclass
class Outcomes:
    """What became of the requests of one tenant, with the time that each answer took."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    retry_after: list[str | None] = field(default_factory=list)

    def within(self, seconds: float) -> int:
        return sum(taken <= seconds for taken in self.seconds)


class Gateway:
    """The whole gateway, called without a server."""

    def __init__(self, folder: Path, tenants: dict[str, TenantLimits], **server: Any) -> None:
        keys, places = key_files(folder, *tenants), {"max_concurrent": PLACES, **server}
        settings = Settings(server=ServerSettings(api_keys=keys, tenants=tenants, **places), backends={})
        self.backend = FakeBackend("ok", latency=SECONDS / 2)  # a word and the end
        self.runtime = Runtime(settings, backends={"m": self.backend})
        self.runtime.start()
        self.app = create_app(self.runtime, settings)
        self.outcomes: defaultdict[str, Outcomes] = defaultdict(Outcomes)

    async def ask(self, tenant: str, sends: float = 0.0, reads: float = 0.0) -> None:
        """One request of a client that takes `sends` seconds to send its body and `reads` to read the answer."""
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
        messages: asyncio.Queue[Any] = asyncio.Queue()
        loop, sent = asyncio.get_running_loop(), []
        messages.put_nowait({"type": "http.request", "body": body[:9], "more_body": True})
        loop.call_later(sends, messages.put_nowait, {"type": "http.request", "body": body[9:], "more_body": False})

        async def send(message: Any) -> None:
            sent.append(message)
            await asyncio.sleep(reads)

        authorization = (b"authorization", f"Bearer key-of-{tenant}".encode())
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), authorization]
        path = "/v1/chat/completions"
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "query_string": b""}
        scope["headers"] = headers
        began = loop.time()
        await self.app(scope, messages.get, send)
        status = sent[0]["status"]
        seen = self.outcomes[tenant]
        seen.statuses[status] += 1
        if status == 200:
            seen.seconds.append(loop.time() - began)
        else:
            seen.retry_after.append(dict(sent[0]["headers"]).get(b"retry-after", b"").decode())


async def flow(gateway: Gateway, tenant: str, rate: float, seconds: float) -> None:
    """Send requests at a steady rate, whether or not earlier ones were answered, and wait for the last."""
    tasks = []
    for _ in range(round(rate * seconds)):
        tasks.append(asyncio.create_task(gateway.ask(tenant)))
        await asyncio.sleep(1 / rate)
    await asyncio.gather(*tasks)


async def goodput(work: Coroutine[Any, Any, None], gateway: Gateway) -> float:
    """Answers a second from the first request to the last answer."""
    await work
    return sum(seen.statuses[200] for seen in gateway.outcomes.values()) / asyncio.get_running_loop().time()


@pytest.mark.parametrize("seconds", SECONDS_OF_LOAD)
def test_c7_five_times_the_capacity_costs_no_goodput(tmp_path: Path, in_virtual_time: Any, seconds: int) -> None:
    peak, loaded = (Gateway(tmp_path, {"a": TenantLimits()}) for _ in range(2))
    in_virtual_time(flow(peak, "a", CAPACITY * 0.95, seconds))
    rate = in_virtual_time(goodput(flow(loaded, "a", CAPACITY * 5, seconds), gateway=loaded))
    full, seen = peak.outcomes["a"], loaded.outcomes["a"]
    assert full.statuses == {200: round(CAPACITY * 0.95 * seconds)}
    assert set(seen.statuses) == {200, 429}
    assert rate >= 0.95 * CAPACITY
    patience = ServerSettings().queue_timeout + 2 * SECONDS
    assert seen.within(patience) == seen.statuses[200]  # no answer comes too late to be of use
    assert all(wait.isdigit() and int(wait) >= 1 for wait in seen.retry_after)
    assert loaded.app.slots.running == loaded.app.slots.waiting == 0
    refused = seen.statuses[429]
    in_virtual_time(flow(loaded, "a", CAPACITY * 0.95, seconds))
    assert seen.statuses[429] == refused  # it recovers at once


def test_c7_a_list_of_an_upstreams_models_takes_a_place(
    gateway: Any, upstream: Any, until: Callable[..., None]
) -> None:
    """Any number of clients may ask for it; the upstream is asked by as many as have a place. Who leaves frees it."""
    go = threading.Event()

    def script(request: Any) -> None:
        go.wait(60)
        request.answer(b'{"data": [{"id": "m"}]}')

    server = upstream(script)
    settings = Settings(
        server=ServerSettings(max_concurrent=2, queue_timeout=0),
        backends={"up": OpenAISettings(base_url=server.url, server_kind="other")},  # type: ignore[arg-type]
    )
    running = gateway({}, settings)
    host, port = running.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for place in range(2):
            asking = stack.enter_context(socket.create_connection((host, int(port))))
            asking.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            until(lambda place=place: running.app.slots.running == place + 1)
        refused = httpx.get(f"{running.url}/v1/models")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert httpx.get(f"{running.url}/v1/models/m").status_code == 429
    until(lambda: running.app.slots.running == 0)
    assert len(server.requests) <= 2
    go.set()
    assert [model["id"] for model in httpx.get(f"{running.url}/v1/models").json()["data"]] == ["m"]


def test_neighbours_a_flood_leaves_other_tenants_their_share(tmp_path: Path, in_virtual_time: Any) -> None:
    gateway = Gateway(tmp_path, {"a": TenantLimits(), "b": TenantLimits()})

    async def both() -> None:
        await asyncio.gather(flow(gateway, "a", CAPACITY * 5, 2), flow(gateway, "b", CAPACITY * 0.4, 2))

    in_virtual_time(both())
    flooding, modest = gateway.outcomes["a"], gateway.outcomes["b"]
    assert modest.statuses == {200: round(CAPACITY * 0.4 * 2)}
    assert modest.within(SECONDS * 2.1) == len(modest.seconds)  # a place is given back after one request's time
    assert flooding.statuses[200] >= 0.95 * 0.6 * CAPACITY * 2  # the rest of the places is not idle


@pytest.mark.parametrize("slowly", ["sends", "reads"])
def test_neighbours_slow_clients_keep_nobody_out(tmp_path: Path, in_virtual_time: Any, slowly: str) -> None:
    gateway = Gateway(tmp_path, {"slow": TenantLimits(), "other": TenantLimits()})

    async def both() -> None:
        slow = asyncio.gather(*(gateway.ask("slow", **{slowly: 60.0}) for _ in range(PLACES)))
        await asyncio.sleep(1)
        await asyncio.gather(slow, flow(gateway, "other", CAPACITY * 0.9, 2))

    in_virtual_time(both())
    assert gateway.outcomes["other"].statuses == {200: round(CAPACITY * 0.9 * 2)}
    assert gateway.outcomes["slow"].statuses == {200: PLACES}
