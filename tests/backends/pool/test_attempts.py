"""When a call is tried again, where, and how long that waits: by counts, in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import aclosing, suppress
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentspec.backends.pool.attempts import Attempts
from agentspec.backends.pool.backend import PoolBackend
from agentspec.backends.pool.prompt import ITEMS, MOST_PIECES, block_hashes, prompt_pieces, scoped_call
from agentspec.errors import NoServerError, UpstreamError, UpstreamIsolationError, UpstreamStatusError
from agentspec.placement import Call, LeastLoaded, Member, RoundRobin
from agentspec.types import GenerateRequest
from tests.backends.pool.conftest import ANSWER

REQUEST = GenerateRequest(model="m", messages=({"role": "user", "content": "hi"},))
REFUSED = httpx.ConnectError("refused")


async def ask(pool: Any, request: GenerateRequest = REQUEST) -> str:
    async with aclosing(PoolBackend(pool).generate(request)) as deltas:
        return "".join([delta.text async for delta in deltas])


async def test_a_quota_of_one_caller_does_not_keep_a_server_from_all_others_for_a_day(
    make_pool: Any, server: Any
) -> None:
    limited, other = server("a", 429, {"retry-after": "86400"}), server("b")
    made = make_pool(limited, other)
    for _ in range(10):
        await ask(made.pool)
    assert len(limited.times()) == 1
    await asyncio.sleep(600)
    limited.status = 200
    for _ in range(10):
        await ask(made.pool)
    assert len(limited.times()) == 6


async def test_another_server_comes_first_after_a_short_random_time(make_pool: Any, server: Any) -> None:
    down, up = server("a", error=REFUSED), server("b")
    made = make_pool(down, up)
    assert await ask(made.pool) == "hi"
    assert 0.012 <= up.times()[0] <= 0.025
    member = made.servers[1].members[0]
    assert (member.calls, member.retries, member.in_flight) == (1, 1, 0)


PIECE = b'data: {"choices": [{"index": 0, "delta": {"content": "h"}}]}\n\n'


@pytest.mark.parametrize("fails", ["at once", "behind a second", "every third", "cuts streams"])
@pytest.mark.parametrize("others", [1.0, 10.0])
async def test_a_server_that_fails_does_not_attract_calls(
    make_pool: Any, server: Any, fails: str, others: float
) -> None:
    """Although it always has the fewest calls under way. Of sixteen clients a minute, those that lose a call ask again
    at once.
    """

    failing, well = server("a", 500), server("b", delay=others)
    failing.delay = 1.0 if fails == "behind a second" else 0.01
    lost = 0

    async def alternate() -> httpx.Response:
        await asyncio.sleep(0.01)
        third = len(failing.seen) % 3 == 0
        return httpx.Response(500 if third else 200, content=json.dumps(ANSWER))

    async def cut() -> httpx.Response:
        return httpx.Response(200, content=PIECE, headers={"content-type": "text/event-stream"})

    if fails in ("every third", "cuts streams"):
        failing.paths["/v1/chat/completions"] = alternate if fails == "every third" else cut
    pool = make_pool(failing, well, policy=LeastLoaded()).pool

    async def client() -> None:
        nonlocal lost
        while asyncio.get_running_loop().time() < 60:
            try:
                await ask(pool)
            except UpstreamError:
                lost += 1

    await asyncio.gather(*(client() for _ in range(16)))
    assert lost <= 40


async def test_requests_that_every_server_errs_at_close_a_model_to_nobody(make_pool: Any, server: Any) -> None:
    servers = [server(name, 500) for name in "abc"]
    made = make_pool(*servers)
    for _ in range(40):
        with suppress(UpstreamError):
            await ask(made.pool)
    assert {one.members[0].state(0.0) for one in made.servers} == {"erring"}
    for one in servers:
        one.status = 200
    assert [await ask(made.pool) for _ in range(9)] == ["hi"] * 9
    assert [len(one.times()) for one in servers] == [16, 16, 17]


async def test_a_call_that_is_cancelled_tells_nothing_about_the_server(make_pool: Any, server: Any) -> None:
    """The trial of a half-open breaker included: another call becomes the trial."""

    slow = server("a", 503)
    made = make_pool(slow, failures=1, max_retries=0)
    with suppress(UpstreamStatusError):
        await ask(made.pool)
    [member] = made.servers[0].members
    with pytest.raises(NoServerError) as caught:
        await ask(made.pool)
    assert caught.value.retry_after == 10.0
    await asyncio.sleep(10)
    slow.status, slow.delay = 200, 5.0
    task = asyncio.create_task(ask(made.pool))
    await asyncio.sleep(1)
    assert member.in_flight == 1 and member.state(asyncio.get_running_loop().time()) == "open"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert member.in_flight == 0
    assert await ask(made.pool) == "hi" and member.state(asyncio.get_running_loop().time()) == "ready"


async def test_half_open_there_is_one_trial_at_a_time(make_pool: Any, server: Any) -> None:
    failing = server("a", 503)
    made = make_pool(failing, failures=1, max_retries=0)
    with suppress(UpstreamStatusError):
        await ask(made.pool)
    await asyncio.sleep(10)
    failing.status, failing.delay = 200, 1.0
    results = await asyncio.gather(*(ask(made.pool) for _ in range(20)), return_exceptions=True)
    assert results[0] == "hi" and all(isinstance(one, NoServerError) for one in results[1:])
    assert len(failing.times()) == 2


async def test_a_trial_that_is_told_to_wait_closes_the_breaker(make_pool: Any, server: Any) -> None:
    """Whoever answers 429 is there; no trial is left open."""

    one = server("a", 503)
    made = make_pool(one, failures=1, max_retries=0)
    for status, pause in ((503, 10.0), (429, 0.0)):
        one.status = status
        with suppress(UpstreamStatusError):
            await ask(made.pool)
        await asyncio.sleep(pause)
    one.status = 200
    assert await ask(made.pool) == "hi" and len(one.times()) == 3


async def test_a_server_whose_tenants_cannot_be_kept_apart_has_not_failed(make_pool: Any, server: Any) -> None:
    """Nothing was sent to it. Another server may be asked."""

    made = make_pool(server("a"), server("b"), failures=1)
    tried = []
    async for attempt in Attempts(made.pool, Call(), 60.0):
        async with attempt:
            tried.append(attempt.member)
            if len(tried) == 1:
                raise UpstreamIsolationError("it cannot be recognised")
    assert tried == ["a", "b"]
    assert [one.members[0].state(0.0) for one in made.servers] == ["ready", "ready"]
    assert made.servers[0].members[0].failures == 0


async def test_a_server_that_only_seems_to_fail_is_asked_if_there_is_no_other(make_pool: Any, server: Any) -> None:
    made = make_pool(server("a"), server("b"), failures=1)
    seeming, gone = (servers.members[0] for servers in made.servers)
    for _ in range(2):
        seeming.probed(0.0, alive=False)
    gone.failed(0.0)
    assert seeming.state(0.0) == "unhealthy" and await ask(made.pool) == "hi" and seeming.calls == 1
    seeming.failed(0.0)
    with pytest.raises(NoServerError):
        await ask(made.pool)


class Counting(RoundRobin):
    """Notes what it is asked and told."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.calls: list[Call] = []

    def choose(self, call: Call, members: Any) -> Member:
        self.counts["choose"] += 1
        self.calls.append(call)
        return super().choose(call, members)

    def placed(self, call: Call, member: Member) -> None:
        self.counts["placed"] += 1

    def removed(self, name: str) -> None:
        self.counts["removed"] += 1


async def test_a_policy_is_asked_once_a_try_with_names_of_the_tenant(make_pool: Any, server: Any) -> None:
    policy = Counting()
    pool = make_pool(*(server(name) for name in "abc"), policy=policy).pool
    for tenant in ("t", "u"):
        call = scoped_call(tenant, "s")
        async for attempt in Attempts(pool, call, 60.0):
            async with attempt:
                attempt.answered(200, {})
    first, second = policy.calls
    assert policy.counts == {"choose": 2, "placed": 2}
    assert first.session != second.session


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([200, 429, 500, 502, 503, 504, 0]), min_size=1, max_size=5), st.integers(0, 3))
def test_however_servers_fail_tries_are_bounded_and_nobody_is_asked_behind_an_answer(
    in_virtual_time: Any, make_pool: Any, server: Any, kinds: list[int], retries: int
) -> None:
    async def work() -> None:
        servers = [server(f"s{at}", kind or 200, error=None if kind else REFUSED) for at, kind in enumerate(kinds)]
        made = make_pool(*servers, max_retries=retries)
        with suppress(UpstreamError):
            await ask(made.pool)
        events = sorted((at, number) for number, one in enumerate(servers) for at in one.times())
        order = [kinds[number] for _, number in events]
        assert 1 <= len(order) <= retries + 1
        assert all(kind in (0, 429, 502, 503) for kind in order[:-1])
        if len(order) < retries + 1:  # whoever gave up earlier had a final answer
            assert order[-1] in (200, 500, 504)
        assert all(member.in_flight == 0 for one in made.servers for member in one.members)

    in_virtual_time(work())


def test_a_chat_begins_as_its_next_turn_does() -> None:
    """What a conversation gets behind it changes none of its blocks; other tools in front of it change all."""
    turns = [
        {"role": "user", "content": "x" * 3000},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    short, long = ({"messages": messages} for messages in (turns, [*turns, {"role": "user", "content": "y" * 3000}]))
    first, second = (list(block_hashes("t", prompt_pieces(fields))) for fields in (short, long))
    assert len(first) == 2 and second[:2] == first and len(second) == 5
    assert not set(first) & set(block_hashes("t", prompt_pieces({**short, "tools": [{"type": "function"}]})))


@pytest.mark.parametrize("item", [1, 54321, "", [], {}, [1, 2]])
def test_a_list_of_many_small_items_is_read_in_few_pieces(item: Any) -> None:
    assert sum(1 for _ in prompt_pieces({"prompt": [item] * 200_000})) <= MOST_PIECES


def test_a_list_of_token_ids_begins_as_a_longer_one_does() -> None:
    """However many of them are encoded at once, and without taking 1, 2 for 12."""

    def text(ids: list[int]) -> bytes:
        return b"".join(prompt_pieces({"prompt": ids}))

    ids = list(range(3 * ITEMS))
    for length in (1, ITEMS - 1, ITEMS, ITEMS + 1, 2 * ITEMS + 7):
        assert text(ids).startswith(text(ids[:length]))
    assert text([1, 2]) != text([12])
