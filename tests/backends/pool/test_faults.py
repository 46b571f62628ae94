"""What the fault of a server means for a call and for the server: by counts of requests, in virtual time."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx2 as httpx
import pytest

from agentspec.backends.openai import TenantIsolation
from agentspec.errors import NoServerError
from tests.backends.pool.conftest import ANSWER, CHAT, REFUSED, Pool, Server, make

LATE, BROKEN = httpx.ReadTimeout("late"), httpx.ReadError("reset")
# the fault, what the caller gets, and the server's state after five such calls
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "too many requests": ({"status": 429}, "hi", "ready"),
    "502": ({"status": 502}, "hi", "open"),
    "503": ({"status": 503}, "hi", "open"),
    "refused": ({"error": REFUSED}, "hi", "open"),
    "no route": ({"error": httpx.ConnectTimeout("late")}, "hi", "open"),
    "400": ({"status": 400}, "UpstreamStatusError", "ready"),
    "404": ({"status": 404}, "UpstreamStatusError", "ready"),
    "500": ({"status": 500}, "UpstreamStatusError", "erring"),
    "501": ({"status": 501}, "UpstreamStatusError", "erring"),
    "504": ({"status": 504}, "UpstreamStatusError", "erring"),
    "late": ({"error": LATE}, "UpstreamTimeoutError", "erring"),
    "broken off": ({"error": BROKEN}, "UpstreamError", "open"),
    "cut stream": ({"cuts": True}, "UpstreamError", "erring"),
}


@pytest.mark.parametrize(("fault", "outcome", "state"), FAULTS.values(), ids=FAULTS)
async def test_each_fault_is_retried_or_reported_and_counted(fault: dict[str, Any], outcome: str, state: str) -> None:
    """A call goes to another server only if this one has not begun to compute it."""
    failing, other, outcomes = Server("a", **fault), Server("b"), list[str]()
    pool = make(failing, other)
    times = 7 if failing.cuts else 5  # the head of an answer makes up for a quarter of a failure
    while len(failing.times()) < times:
        outcomes.append(await pool.outcome())
    elsewhere = outcome == "hi"
    assert outcomes.count(outcome) == (len(outcomes) if elsewhere else times) and {*outcomes} <= {outcome, "hi"}
    members = pool.members
    assert members["a"].failures == (0 if state == "ready" else times)
    assert (members["a"].state, members["b"].state) == (state, "ready")
    assert members["b"].retries == (times if elsewhere else 0)
    assert members["a"].in_flight == members["b"].in_flight == 0


SOON = format_datetime(datetime.now(UTC) + timedelta(days=365), usegmt=True)
WAITS: dict[str, tuple[dict[str, str], float]] = {
    "seconds": ({"retry-after": "20"}, 20.0),
    "milliseconds first": ({"retry-after-ms": "2500", "retry-after": "1"}, 2.5),
    "a date": ({"retry-after": SOON}, 600.0),
    **{
        wrong: ({"retry-after": wrong}, 0.0)
        for wrong in ("", "soon", "-3", "inf", "nan", "Fri, 01 Jan 2027 99999999999999999999:00:00 GMT")
    },
}


@pytest.mark.parametrize(("headers", "seconds"), WAITS.values(), ids=WAITS)
async def test_a_server_gets_no_calls_for_the_time_that_it_asks(headers: dict[str, str], seconds: float) -> None:
    busy = Server("a", 429, headers)
    pool = make(busy, max_retries=1)
    assert await pool.outcome() == "UpstreamStatusError"
    if seconds < 60:  # the patience of a call
        first, second = busy.times()
        assert seconds <= second - first <= seconds + 0.2
    else:
        assert len(busy.times()) == 1
        await asyncio.sleep(seconds + 1)
        busy.status = 200
        assert await pool.outcome() == "hi"


async def test_a_retry_that_would_begin_after_the_deadline_is_not_made() -> None:
    busy = Server("a", 429, {"retry-after": "20"})
    pool = make(busy)
    with pytest.raises(Exception, match="429"):
        await pool.ask(deadline_s=10.0)
    assert asyncio.get_running_loop().time() < 1 and len(busy.times()) == 1


@pytest.mark.parametrize("fails", ["at once", "after a second", "every third", "cuts streams"])
@pytest.mark.parametrize("others", [1.0, 10.0])
async def test_a_server_that_fails_does_not_attract_calls(fails: str, others: float) -> None:
    """Although it always has the fewest calls under way. Of sixteen clients a minute, those that lose a call ask again
    at once.
    """
    failing, well = Server("a", 500), Server("b", delay=others)
    failing.delay = 1.0 if fails == "after a second" else 0.01
    failing.cuts = fails == "cuts streams"
    lost = 0

    async def alternate() -> httpx.Response:
        await asyncio.sleep(0.01)
        return httpx.Response(500 if len(failing.seen) % 3 == 0 else 200, content=json.dumps(ANSWER))

    if fails == "every third":
        failing.paths[CHAT] = alternate
    pool = make(failing, well, placement="least_loaded")

    async def client() -> None:
        nonlocal lost
        while asyncio.get_running_loop().time() < 60:
            lost += await pool.outcome() != "hi"

    await asyncio.gather(*(client() for _ in range(16)))
    assert lost <= 40


async def test_requests_that_fail_at_every_server_close_no_model() -> None:
    servers = [Server(name, 500) for name in "abc"]
    pool = make(*servers)
    for _ in range(40):
        await pool.outcome()
    assert set(pool.states()) == {"erring"}
    for one in servers:
        one.status = 200
    assert [await pool.outcome() for _ in range(9)] == ["hi"] * 9
    assert [len(one.times()) for one in servers] == [16, 16, 17]


# The circuit breaker.


async def opened(one: Server, **fleet: Any) -> Pool:
    """A pool of a server that has failed once, which opened its breaker."""
    one.status = 503
    pool = make(one, failures=1, max_retries=0, **fleet)
    assert await pool.outcome() == "UpstreamStatusError" and pool.states() == ["open"]
    return pool


async def test_an_open_breaker_allows_one_trial_every_ten_seconds() -> None:
    failing = Server("a", 503)
    pool = make(failing, max_retries=0)
    for _ in range(50):
        await pool.outcome()
        await asyncio.sleep(1)
    assert failing.times() == [0, 1, 2, 3, 4, 14, 24, 34, 44]
    with pytest.raises(NoServerError) as caught:
        await pool.ask()
    assert caught.value.retry_after == 4.0


async def test_of_a_server_that_errs_only_a_trial_closes_the_breaker_and_one_failure_opens_it_again() -> None:
    erring = Server("a", 500)
    pool = make(erring, failures=2)
    for _ in range(2):
        await pool.outcome()
    erring.status = 200
    assert await pool.outcome() == "hi" and pool.states() == ["erring"]  # there is no other server
    await asyncio.sleep(10)
    assert await pool.outcome() == "hi" and pool.states() == ["ready"]
    erring.status = 500
    await pool.outcome()
    assert pool.states() == ["erring"]


async def test_half_open_there_is_one_trial_at_a_time() -> None:
    failing = Server("a")
    pool = await opened(failing)
    await asyncio.sleep(10)
    failing.status, failing.delay = 200, 1.0
    results = await asyncio.gather(*(pool.outcome() for _ in range(20)))
    assert results == ["hi"] + ["NoServerError"] * 19 and len(failing.times()) == 2


async def test_a_trial_that_takes_long_is_followed_by_another() -> None:
    slow = Server("a")
    pool = await opened(slow)
    await asyncio.sleep(10)
    slow.status, slow.delay = 200, 100.0
    trials = []
    for _ in range(30):
        trials.append(asyncio.create_task(pool.outcome()))
        await asyncio.sleep(1)
    assert slow.times() == [0, 10, 20, 30]
    assert (await asyncio.gather(*trials)).count("hi") == 3 and pool.states() == ["ready"]


async def test_a_trial_that_is_cancelled_leaves_the_next_call_to_be_one() -> None:
    slow = Server("a")
    pool = await opened(slow)
    await asyncio.sleep(10)
    slow.status, slow.delay = 200, 5.0
    task = asyncio.create_task(pool.ask())
    await asyncio.sleep(1)
    assert pool.members["a"].in_flight == 1 and pool.states() == ["open"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert pool.members["a"].in_flight == 0
    assert await pool.ask() == "hi" and pool.states() == ["ready"]


async def test_a_server_that_cannot_isolate_tenants_has_not_failed() -> None:
    """Nothing was sent to it. Another server is asked."""
    servers = [Server(name) for name in "ab"]
    pool = make(*servers, failures=1)
    assert pool.runtime.fleet is not None
    pool.runtime.fleet.servers["a"].isolate(TenantIsolation(b"s" * 32, required=True))
    assert [await pool.ask() for _ in range(4)] == ["hi"] * 4
    assert [len(one.times()) for one in servers] == [0, 4]
    assert pool.states() == ["ready", "ready"] and pool.members["a"].failures == 0
