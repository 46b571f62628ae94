"""What is done in the background: health and load. In virtual time, by counts of requests."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.metrics import ServerLoad
from agentspec.backends.pool.fleet import PoolWatch
from agentspec.backends.pool.member import PoolMember
from agentspec.backends.settings import FleetSettings, OpenAISettings

MODELS = {"data": [{"id": "m", "owned_by": "vllm"}]}
METRICS = b"vllm:num_requests_running 3\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n"


async def answering(content: bytes, status: int = 200) -> httpx.Response:
    return httpx.Response(status, content=content)


def watching(made: Any) -> PoolWatch:
    return PoolWatch(made.servers, asyncio.get_running_loop().time)


async def test_health_and_load_are_looked_at_once_a_second(make_pool: Any, server: Any) -> None:
    one = server("a", paths={"/metrics": lambda: answering(METRICS)})
    made = make_pool(one, kind="vllm", probe=True)
    watch = watching(made)
    watch.ensure()
    watch.ensure()  # it runs already
    await asyncio.sleep(20.1)
    await watch.aclose()
    health, metrics = one.times("/health"), one.times("/metrics")
    assert len(health) == len(metrics) == 21
    assert min(later - sooner for sooner, later in pairwise(metrics)) >= 1
    [member] = made.servers[0].members
    assert member.load == ServerLoad(3, 2, 0.5) and member.seen().waiting == 2 and member.seen().kv_use == 0.5
    assert member.seen().others == 5  # no call of its own is under way
    before = len(one.seen)
    await asyncio.sleep(20)
    assert len(one.seen) == before


async def test_calls_of_its_own_are_not_taken_for_those_of_others(make_pool: Any, server: Any) -> None:
    [member] = make_pool(server("a")).servers[0].members
    for _ in range(4):
        member.begin(0.0, retry=False)
    member.measured(ServerLoad(3, 2, 0.5))
    assert (member.seen().in_flight, member.seen().others) == (4, 1)
    member.end(told=True)
    assert (member.seen().in_flight, member.seen().others) == (3, 1)
    member.measured(ServerLoad(1, 0, 0.5))  # two are on their way to it, or from it
    assert member.seen().others == 0
    member.measured(None)
    assert member.seen().others == 0


async def test_metrics_that_hang_keep_nobody_waiting_and_are_not_asked_for_twice_at_once(
    make_pool: Any, server: Any
) -> None:
    async def hanging() -> httpx.Response:
        await asyncio.sleep(1000)
        return httpx.Response(200)

    one = server("a", paths={"/metrics": hanging})
    made = make_pool(one, kind="vllm", probe=True)
    watch = watching(made)
    watch.ensure()
    await asyncio.sleep(30)
    assert 10 <= len(one.times("/metrics")) <= 15  # each takes its two seconds
    [member] = made.servers[0].members
    assert member.load is None and member.state(30.0) == "ready"
    await watch.aclose()


async def test_a_server_without_metrics_is_seldom_asked_for_them(make_pool: Any, server: Any) -> None:
    one = server("a", paths={"/metrics": lambda: answering(b"", 404)})
    watch = watching(make_pool(one, kind="vllm", probe=True))
    watch.ensure()
    await asyncio.sleep(59)
    assert len(one.times("/metrics")) == 1
    await watch.aclose()


async def test_hosted_apis_are_left_alone(make_pool: Any, server: Any) -> None:
    one = server("a")
    watch = watching(make_pool(one, kind="vllm", probe=False))
    watch.ensure()
    await asyncio.sleep(30)
    assert one.seen == []
    await watch.aclose()


def test_two_failed_looks_take_a_server_out_and_one_good_one_brings_it_back(
    in_virtual_time: Any, make_pool: Any, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agentspec")

    async def work() -> None:
        one = server("a", 503)
        made = make_pool(one, probe=True)
        lost: list[str] = []
        made.servers[0].lost.append(lost.append)
        watch = watching(made)
        watch.ensure()
        [member] = made.servers[0].members
        await asyncio.sleep(1)
        assert member.state(0.0) == "ready" and not lost
        await asyncio.sleep(1)
        assert member.state(0.0) == "unhealthy" and lost == ["a"]
        await asyncio.sleep(20)
        one.status = 404  # it has no such route, but it answers
        await asyncio.sleep(2)
        assert member.state(0.0) == "ready"
        await watch.aclose()

    in_virtual_time(work())
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert told == ["a does not answer /health", "a answers /health again"]  # once each, and not at each look


async def test_a_server_that_is_back_need_not_wait_for_its_breaker(make_pool: Any, server: Any) -> None:
    """If it could not be reached; one that answers with errors has to."""

    made = make_pool(server("a"), server("b"), probe=True, failures=1)
    unreachable, erring = (one.members[0] for one in made.servers)
    unreachable.failed(0.0, unreachable=True)
    erring.failed(0.0)
    watch = watching(made)
    watch.ensure()
    await asyncio.sleep(0.5)
    assert (unreachable.state(0.5), erring.state(0.5)) == ("half_open", "open")
    await watch.aclose()


class MemberMachine(RuleBasedStateMachine):
    """What a member remembers between calls is never stale, and its counts fit."""

    def __init__(self) -> None:
        super().__init__()
        backend = OpenAIBackend(OpenAISettings(base_url="http://a/v1"))  # type: ignore[arg-type]
        self.member = PoolMember("a", "a", backend, FleetSettings(failures=2))
        self.now = 0.0
        self.trials: list[bool] = []  # of the calls under way

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.member.takes_calls(self.now, erring=True, last_resort=True))
    @rule()
    def begin(self) -> None:
        self.trials.append(self.member.begin(self.now, retry=False))

    @precondition(lambda self: self.trials)
    @rule(told=st.sampled_from(["succeeded", "failed", "erring", ""]))
    def end(self, told: str) -> None:
        trial = self.trials.pop(0)
        if told in ("failed", "erring"):
            self.member.failed(self.now, erring=told == "erring", trial=trial)
        elif told:
            self.member.succeeded(trial=trial)
        self.member.end(told=bool(told), trial=trial)

    @rule(alive=st.booleans())
    def probe(self, alive: bool) -> None:
        self.member.probed(self.now, alive=alive)

    @rule(seconds=st.floats(0, 20))
    def ask_to_wait(self, seconds: float) -> None:
        self.member.asked_to_wait(self.now + seconds)

    @invariant()
    def follows_from_its_state(self) -> None:
        state = self.member.state(self.now)
        assert self.member.takes_calls(self.now) == (state in ("ready", "half_open"))
        everything = self.member.takes_calls(self.now, erring=True, last_resort=True)
        assert everything == (state != "open")
        assert self.member.in_flight == len(self.trials)


TestMember = MemberMachine.TestCase
TestMember.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
