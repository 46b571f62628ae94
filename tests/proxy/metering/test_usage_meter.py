"""What keys used reaches the store: at once at the end, every few seconds else, and later if the store fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.settings import CacheSettings
from agentspec.cache.usage import MemoryUsage, UsageRow, day_of
from agentspec.errors import CacheUnavailableError, EngineError
from agentspec.proxy.admission.auth import Identity
from agentspec.proxy.metering.demand import Demand
from agentspec.proxy.metering.key_limits import KeyLimits, Owner
from agentspec.proxy.metering.usage_meter import FLUSH_SECONDS, UsageMeter
from agentspec.proxy.metering.window import DAY
from agentspec.proxy.request_record import RequestRecord
from agentspec.settings.api_keys import ApiKey
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Speculation, Usage

TODAY = 20_000 * DAY + 5000.0
OWNER = ("a", "KEY_A")
BODY = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@dataclass
class Flaky:
    """A store that fails while it is told to."""

    inner: MemoryUsage = field(default_factory=lambda: MemoryUsage(400))
    fails: bool = False
    calls: int = 0
    stores: bool = False  # before it fails

    def add(self, rows: Sequence[UsageRow], *, since: float, day: str, batch: str | None = None) -> Mapping[Owner, int]:
        self.calls += 1
        found = self.inner.add(rows, since=since, day=day, batch=batch) if self.stores or not self.fails else {}
        if self.fails:
            raise CacheUnavailableError("the database is away")
        return found


def over(prompt: int, completion: int, model: str = "m") -> RequestRecord:
    record = RequestRecord("id", "POST", identity=Identity("a", key="KEY_A"), model=model)
    record.usage = Usage(prompt, completion, 1)
    record.speculation = Speculation(drafted=9, accepted=2, steps=3)
    return record


def limited(**limits: int) -> KeyLimits:
    found = KeyLimits()
    found.update(ServerSettings(api_keys=(ApiKey(tenant="a", key_env="KEY_A", **limits),)))
    return found


def test_counts_of_a_key_and_model_make_one_row() -> None:
    store = Flaky()
    meter = UsageMeter(lambda: store, KeyLimits(), clock=lambda: TODAY)

    async def run() -> None:
        meter.note(OWNER, over(3, 4), failed=False, estimated=0)
        meter.note(OWNER, over(5, 6), failed=False, estimated=0)
        meter.note(OWNER, RequestRecord("id", "POST", model="m"), failed=True, estimated=0)
        meter.note(OWNER, RequestRecord("id", "POST", model="other"), failed=False, estimated=70)
        await meter.flush()
        await meter.flush()

    asyncio.run(run())
    first = UsageRow(day_of(TODAY), *OWNER, "m", 3, 1, 8, 2, 10, 4)
    assert store.inner.read() == [first, UsageRow(day_of(TODAY), *OWNER, "other", 1, estimated_tokens=70)]
    assert store.calls == 1, "nothing is asked while there is nothing to tell"


@pytest.mark.parametrize("stores", [False, True], ids=["before it stores", "after it has stored"])
def test_what_cannot_be_stored_waits_and_is_counted_once(stores: bool) -> None:
    store = Flaky(fails=True, stores=stores)
    meter = UsageMeter(lambda: store, KeyLimits(), clock=lambda: TODAY)

    async def run() -> None:
        for _ in range(4):
            meter.note(OWNER, over(1, 1), failed=False, estimated=0)
            await meter.flush()
        store.fails = False
        await meter.flush()

    asyncio.run(run())
    assert [row.requests for row in store.inner.read()] == [4]


def test_it_is_stored_every_few_seconds(in_virtual_time: Callable[..., Any]) -> None:
    store = Flaky()
    meter = UsageMeter(lambda: store, KeyLimits(), clock=lambda: TODAY)

    async def run() -> None:
        task = asyncio.create_task(meter.run())
        meter.note(OWNER, over(1, 1), failed=False, estimated=0)
        await asyncio.sleep(FLUSH_SECONDS - 0.1)
        assert store.calls == 0
        await asyncio.sleep(0.2)
        while meter._storing.locked():  # its thread works by another clock
            await asyncio.sleep(0)
        assert store.calls == 1
        task.cancel()

    in_virtual_time(run())


def test_the_day_is_what_all_gateways_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gateways, and one that starts later: each knows of the others' tokens after its next report."""
    store = MemoryUsage(400)

    async def run() -> None:
        gateways = []
        for _ in range(2):
            limits = limited(tokens_per_day=100)
            gateways.append((limits, UsageMeter(lambda: store, limits, reads_day=True)))
        for limits, meter in gateways:
            await meter.flush()
            verdict, settle = limits.decide(OWNER, Demand(45, 0))
            assert settle is not None and verdict.standing[0][2] == 55
            settle(40)
            meter.note(OWNER, over(30, 10), failed=False, estimated=0)
        for _, meter in (*gateways, *gateways):
            await meter.flush()
        third = limited(tokens_per_day=100)
        await UsageMeter(lambda: store, third, reads_day=True).flush()
        for limits in (*(limits for limits, _ in gateways), third):
            assert limits.decide(OWNER, Demand(21, 0))[0].refusal is not None
            assert limits.decide(OWNER, Demand(20, 0))[0].standing[0][2] == 0

    asyncio.run(run())


def test_a_gateway_stores_what_keys_used_and_goes_on_with_the_day(
    gateway: Any, until: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_A", "canary")
    keys = (ApiKey(tenant="a", key_env="KEY_A", tokens_per_day=1_000_000), ApiKey(role="operator", key_env="KEY_A_OP"))
    monkeypatch.setenv("KEY_A_OP", "canary-op")
    settings = Settings(
        server=ServerSettings(api_keys=keys), cache=CacheSettings(path=tmp_path, memory_bytes=1 << 20), backends={}
    )
    headers = {"authorization": "Bearer canary"}
    backends = {"fake": FakeBackend(Answer(text="one two")), "broken": FakeBackend(Answer(error=EngineError("x")))}
    before, left = day_of(time.time()), []
    for _ in range(2):
        running = gateway(backends, settings)
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=BODY, headers=headers)
        left.append(int(answer.headers["x-ratelimit-remaining-tokens-day"]))
        tokens = answer.json()["usage"]["total_tokens"]
        assert httpx.post(f"{running.url}/v1/chat/completions", json={**BODY, "model": "broken"}, headers=headers)
        assert running.metric("agentspec_tenant_tokens_total", tenant="a", kind="completion") == 2
        running.server.should_exit = True
        until(lambda running=running: not running.runtime.ready)  # which comes last
        assert running.runtime._cache.opened is None, "the index is not read for it"
    if day_of(time.time()) == before:
        assert left[1] == left[0] - tokens
    with SuffixCache.open(tmp_path, mode="follower", memory_bytes=1 << 20) as opened:
        rows = opened.usage.read()
    assert {(row.tenant, row.key, row.model) for row in rows} == {("a", "KEY_A", "fake"), ("a", "KEY_A", "broken")}
    assert sum(row.tokens for row in rows) == 2 * tokens
    assert sum(row.requests for row in rows) == 4 and sum(row.errors for row in rows) == 2


def test_without_keys_nothing_is_counted(gateway: Any) -> None:
    running = gateway({"fake": FakeBackend("hi")})
    assert httpx.post(f"{running.url}/v1/chat/completions", json=BODY).status_code == 200
    assert running.metric("agentspec_tenant_tokens_total", tenant="default", kind="prompt") == 0
    assert running.runtime._cache.opened is None, "the cache is not opened for it"
