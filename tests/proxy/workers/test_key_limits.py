"""Limits of keys that hold over all workers, and what a worker that is gone leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest

from agentspec.cache import SuffixCache
from agentspec.errors import OverRateLimitError, RateLimitError
from agentspec.proxy.metering.demand import Demand
from agentspec.proxy.metering.key_limits import KeyLimits
from agentspec.proxy.metering.limiter import Clock
from agentspec.proxy.workers.key_limits import SharedKeyLimits, WorkerKeyLimits
from agentspec.settings.api_keys import ApiKey
from agentspec.settings.server import ServerSettings

OWNER = ("a", "KEY")
MORNING = 20_000 * 86400.0 + 30_000


class Parent:
    """Limits and their workers, whose messages arrive in the next turn of the loop, as they come over a channel."""

    def __init__(self, workers: int = 2, **limits: int) -> None:
        settings = ServerSettings(api_keys=(ApiKey(tenant="a", key_env="KEY", **limits),))
        self.limits = KeyLimits(Clock(lambda: 1000.0, lambda: MORNING))
        self.limits.update(settings)
        self.workers = [SharedKeyLimits() for _ in range(workers)]
        self.held = [WorkerKeyLimits(self.limits, self._to(worker)) for worker in self.workers]
        for worker, held in zip(self.workers, self.held, strict=True):
            worker.update(settings)
            worker.send = self._from(held)

    def _to(self, worker: SharedKeyLimits) -> Callable[..., None]:
        def send(name: str, *told: Any) -> None:
            assert name == "limited"
            asyncio.get_running_loop().call_soon(lambda: worker.answered(*orjson.loads(orjson.dumps(told))))

        return send

    def _from(self, held: WorkerKeyLimits) -> Callable[..., None]:
        def send(name: str, *told: Any) -> None:
            asyncio.get_running_loop().call_soon(lambda: getattr(held, name)(*orjson.loads(orjson.dumps(told))))

        return send


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_all_workers_share_what_a_key_has() -> None:
    async def main() -> None:
        parent = Parent(requests_per_minute=3, tokens_per_minute=100)
        first, second = parent.workers
        assert first.has(OWNER) and not first.has(("a", "OTHER"))
        verdict, settle = await first.admit(OWNER, Demand(60, 0))
        assert settle is not None
        assert verdict.standing == [("requests", 3, 2, 60), ("tokens", 100, 40, 60)]
        refused, nothing = await second.admit(OWNER, Demand(50, 0))
        assert isinstance(refused.refusal, RateLimitError) and nothing is None
        assert (refused.refusal.limit, refused.refusal.retry_after) == ("tokens_per_minute", 60)
        too_large, _ = await second.admit(OWNER, Demand(101, 0))
        assert isinstance(too_large.refusal, OverRateLimitError) and too_large.refusal.param == "max_tokens"
        settle(10)
        await turns()
        verdict, _ = await second.admit(OWNER, Demand(90, 0))
        assert verdict.refusal is None and verdict.standing[1] == ("tokens", 100, 0, 60)

    run(main())


def test_a_worker_that_is_gone_frees_its_places_and_its_tokens_stay_charged() -> None:
    async def main() -> None:
        parent = Parent(concurrent_requests=2, tokens_per_day=1000)
        first, second = parent.workers
        for _ in range(2):
            await first.admit(OWNER, Demand(100, 0))
        assert (await second.admit(OWNER, Demand(1, 0)))[0].refusal is not None
        parent.held[0].leave_all()
        verdict, _ = await second.admit(OWNER, Demand(1, 0))
        assert verdict.refusal is None and verdict.standing[0][2] == 799

    run(main())


def test_a_client_that_leaves_while_the_parent_is_asked_holds_nothing() -> None:
    async def main() -> None:
        parent = Parent(concurrent_requests=1, tokens_per_minute=100)
        for turn in range(6):  # of the loop, until it leaves
            task = asyncio.create_task(parent.workers[0].admit(OWNER, Demand(100, 0)))
            for _ in range(turn):
                await asyncio.sleep(0)
            if task.done():
                _, settle = task.result()
                assert settle is not None
                settle(0)
            task.cancel()
            await turns()
        verdict, _ = await parent.workers[1].admit(OWNER, Demand(100, 0))
        assert verdict.refusal is None

    run(main())


def test_what_workers_store_counts_once() -> None:
    async def main() -> None:
        parent = Parent(tokens_per_day=1000)
        for worker, total in zip(parent.workers, (100, 200), strict=True):
            _, settle = await worker.admit(OWNER, Demand(50, 0))
            assert settle is not None
            settle(100)
            worker.recorded(20_000, {OWNER: 100}, {OWNER: total, ("b", "OTHER"): 5})
        await turns()
        verdict, _ = await parent.workers[0].admit(OWNER, Demand(1, 0))
        assert verdict.standing[0][2] == 1000 - 200 - 1

    run(main())


ANSWER = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
CONFIGURATION = """
[server]
workers = 2
[[server.api_keys]]
tenant = "a"
key_file = "a"
name = "ci"
requests_per_minute = 10
tokens_per_day = 100_000
[[server.api_keys]]
tenant = "b"
key_file = "b"
[cache]
path = "cache"
store = false
[backends.up]
kind = "openai"
base_url = "URL"
shared_upstream = true
[models.m]
backend = "up"
"""


@pytest.mark.slow
def test_two_workers_limit_and_store_as_one(upstream: Any, start_workers: Any, tmp_path_factory: Any) -> None:
    def script(request: Any) -> None:
        request.answer(json.dumps(ANSWER).encode(), 200 if request.method == "POST" else 404)

    folder = tmp_path_factory.mktemp("keys")
    for name in ("a", "b"):
        (folder / name).write_text(f"canary-{name}")
    text = CONFIGURATION.replace("URL", upstream(script).url)
    for name in ("a", "b"):
        text = text.replace(f'key_file = "{name}"', f'key_file = "{folder / name}"')
    gateway = start_workers(text).ready()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

    def ask(client: Any) -> Any:
        return client.post("/v1/chat/completions", json=body)

    with gateway.clients(8, "canary-a") as clients, gateway.clients(8, "canary-b") as others:
        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(ask, clients * 3), *pool.map(ask, others * 2)]
        statuses = Counter(answer.status_code for answer in answers[:24])
        assert statuses == {200: 10, 429: 14}
        assert {answer.status_code for answer in answers[24:]} == {200}
        left = sorted(
            int(answer.headers["x-ratelimit-remaining-requests"])
            for answer in answers[:24]
            if answer.status_code == 200
        )
        assert left == list(range(10)), "each request of both workers was counted once"
        assert all(1 <= int(one.headers["retry-after"]) <= 60 for one in answers[:24] if one.status_code == 429)
        # What a killed worker held is free again, and what it counted is not forgotten.
        os.kill(gateway.pid(1), signal.SIGKILL)
        gateway.said("ready", worker=1, times=2)
    with gateway.client("canary-a") as client:
        assert ask(client).status_code == 429
        gateway.file.write_text(text.replace("requests_per_minute = 10", "requests_per_minute = 12"))
        gateway.process.send_signal(signal.SIGHUP)
        gateway.said("configuration reloaded", times=3)  # by the parent and both workers
        found = [ask(client).status_code for _ in range(3)]
        assert found == [200, 200, 429]
    assert gateway.end() == 0
    with SuffixCache.open(gateway.file.parent / "cache", mode="follower", memory_bytes=1 << 20) as opened:
        rows = {(row.tenant, row.key, row.model): row for row in opened.usage.read()}
    assert rows["b", str(folder / "b"), "m"].requests <= 16
    ours = rows["a", "ci", "m"]
    assert 2 <= ours.requests <= 12 and ours.tokens == 5 * ours.requests, "but for what the killed one had not stored"
