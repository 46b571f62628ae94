"""What is done in the background: health and load. In virtual time, by counts of requests."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import httpx2 as httpx
import pytest

from tests.backends.pool.conftest import REFUSED, Pool, Server, make

VLLM = (
    '# HELP vllm:num_requests_running x\nvllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
    'vllm:num_requests_running{engine="1",model_name="m"} 1.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
)
SGLANG = 'sglang:num_running_reqs{m="x"} 5\nsglang:num_queue_reqs{m="x"} 7\nsglang:token_usage{m="x"} 1.5\n'
DRAFTING = VLLM + "".join(
    f'agentspec_drafter_{name}_tokens_total{{source="{source}",tenant="{tenant}"}} {value}\n'
    for name, source, tenant, value in (
        *(("draft", "cache", "a", "7.0"), ("draft", "cache", "b", "3.0"), ("accepted", "cache", "a", "4.0")),
        *(("draft", "prediction", "a", "-1"), ("draft", "elsewhere", "a", "9"), ("accepted", "cache", "b", "NaN")),
    )
)
OTHER = "process_cpu_seconds_total 3.0\nvllm:num_requests_running NaN\n"


def answering(content: str, status: int = 200) -> Any:
    async def answer() -> httpx.Response:
        return httpx.Response(status, content=content.encode())

    return answer


async def ended(pool: Pool) -> None:
    assert pool.runtime.fleet is not None
    await pool.runtime.fleet.aclose()


@pytest.mark.parametrize(
    ("metrics", "load"),
    [(VLLM, (4, 2, 0.75)), (DRAFTING, (4, 2, 0.75)), (SGLANG, (5, 7, 1.0)), (OTHER, (None, None, None))],
)
async def test_health_and_load_are_read_once_a_second(metrics: str, load: tuple[Any, ...]) -> None:
    one = Server("a", paths={"/metrics": answering(metrics)})
    pool = make(one, kind="vllm", probe=True)
    for _ in range(2):
        await pool.begin()
    await asyncio.sleep(20.5)
    member = pool.members["a"]
    assert (member.running, member.waiting, member.kv_use) == load
    counts = ({"cache": 10, "prediction": 0}, {"cache": 4}) if metrics == DRAFTING else ({}, {})
    assert (member.drafted, member.accepted) == counts
    await ended(pool)
    assert one.times("/health") == one.times("/metrics") == list(range(21))
    before = len(one.seen)
    await asyncio.sleep(20)
    assert len(one.seen) == before


async def test_calls_go_where_fewer_run_and_own_calls_are_not_counted_twice() -> None:
    """`a` runs two calls of another gateway's as well."""
    servers = {"a": Server("a", delay=20.0), "b": Server("b", delay=20.0)}

    async def metrics(name: str, others: int) -> httpx.Response:
        return await answering(f"vllm:num_requests_running {len(servers[name].times()) + others}\n")()

    servers["a"].paths["/metrics"] = partial(metrics, "a", 2)
    servers["b"].paths["/metrics"] = partial(metrics, "b", 0)
    for one in servers.values():
        one.paths["/health"] = answering("")
    pool = make(*servers.values(), kind="vllm", probe=True, placement="least_loaded")
    await pool.begin()
    calls = []
    for _ in range(8):
        await asyncio.sleep(1.1)
        calls.append(asyncio.create_task(pool.ask()))
    await asyncio.gather(*calls)
    assert [len(one.times()) for one in servers.values()] == [3, 5]
    await ended(pool)


async def test_hosted_apis_are_not_probed() -> None:
    one = Server("a")
    pool = make(one, kind="vllm", probe=False)
    await pool.begin()
    await asyncio.sleep(60)
    assert not one.seen
    await ended(pool)


async def test_two_failed_health_checks_exclude_a_server_and_one_success_readmits_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "agentspec")
    one, other = Server("a", paths={"/health": answering("", 503)}), Server("b")
    pool = make(one, other, probe=True)
    await pool.begin()
    await asyncio.sleep(0.5)
    assert pool.states() == ["ready", "ready"]
    await asyncio.sleep(1)
    assert pool.states() == ["unhealthy", "ready"]
    for _ in range(4):
        await pool.ask()
    assert not one.times()
    await asyncio.sleep(20)
    one.paths["/health"] = answering("", 404)  # it has no such route, but it answers
    await asyncio.sleep(2)
    assert pool.states()[0] == "ready"
    lines = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert [line for line in lines if line.startswith("a ")] == ["a does not answer /health", "a answers /health again"]
    one.paths["/health"] = answering("", 503)
    other.error = REFUSED
    await asyncio.sleep(2)
    assert pool.states()[0] == "unhealthy"
    assert "hi" in [await pool.outcome() for _ in range(12)]  # it is asked if no other takes calls
    await ended(pool)


async def test_a_server_that_is_reachable_again_is_tried_at_once() -> None:
    """If it could not be reached; one that answers with errors has to."""
    unreachable, erring = Server("a", error=REFUSED), Server("b", 503)
    erring.paths["/health"] = answering("")
    pool = make(unreachable, erring, probe=True, failures=1, max_retries=0)
    for _ in range(2):
        await pool.outcome()
    assert pool.states() == ["open", "open"]
    unreachable.error = None
    await asyncio.sleep(2)
    assert pool.states() == ["half_open", "open"]
    await ended(pool)
