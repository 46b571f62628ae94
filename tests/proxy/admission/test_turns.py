"""`server.order`: whose turn it is within a tenant, and that tenants share as before."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from starlette.types import Message

from agentspec.errors import OverloadedError
from agentspec.proxy.admission.concurrency import ConcurrencyLimiter
from agentspec.proxy.admission.turns import ProgramCall, program_call
from agentspec.settings.api_keys import ApiKey
from agentspec.settings.server import ServerSettings, TenantLimits

pytestmark = pytest.mark.anyio


async def silent() -> Message:
    return await asyncio.get_running_loop().create_future()


class Line:
    """One place for everybody, on a clock that stands still; requests end when they are told to."""

    def __init__(self, order: str = "workflow", **server: Any) -> None:
        self.settings = ServerSettings(max_concurrent=1, queue_timeout=1000.0, order=order, **server)
        self.limiter = ConcurrencyLimiter(self.settings)
        self.loop, self.now = asyncio.get_running_loop(), 0.0
        begun = self.loop.time()
        self.loop.time = lambda: begun + self.now  # type: ignore[method-assign]
        self.served: list[str] = []
        self.over = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, name: str, call: ProgramCall | None = None, tenant: str = "a") -> None:
        self.tasks.append(asyncio.create_task(self._request(name, call, tenant)))
        await settle()

    async def _request(self, name: str, call: ProgramCall | None, tenant: str) -> None:
        async with self.limiter.enter(tenant, silent, call):
            self.served.append(name)
            await self.over.wait()

    async def end(self, seconds: float = 0.0) -> None:
        """The running request ends after so many seconds, and the next one gets its place."""
        self.now += seconds
        self.over.set()
        self.over = asyncio.Event()
        await settle()


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("order", "expected"),
    [("fair", ["first", "patient", "none", "urgent"]), ("workflow", ["first", "none", "urgent", "patient"])],
)
async def test_the_nearest_deadline_goes_first_where_the_order_says_so(order: str, expected: list[str]) -> None:
    line = Line(order)
    await line.come("first", ProgramCall("s0"))
    await line.come("patient", ProgramCall("s1", deadline_s=400.0))
    await line.come("none")
    await line.come("urgent", ProgramCall("s2", deadline_s=5.0))
    for _ in range(4):
        await line.end()
    assert line.served == expected


async def test_programs_that_had_much_service_let_others_pass() -> None:
    line = Line()
    await line.come("long, first", ProgramCall("long"))
    await line.end(seconds=60.0)
    await line.come("another", ProgramCall("other"))
    await line.come("long, second", ProgramCall("long"))
    await line.come("new", ProgramCall("new"))
    for _ in range(4):
        await line.end()
    assert line.served == ["long, first", "another", "new", "long, second"]


@pytest.mark.parametrize(("pressed", "expected"), [(False, ["new", "begun"]), (True, ["begun", "new"])])
async def test_programs_that_have_begun_go_first_where_kv_caches_are_nearly_full(
    pressed: bool, expected: list[str]
) -> None:
    line = Line()
    line.limiter.pressed = lambda: pressed
    await line.come("first", ProgramCall("s"))
    await line.end(seconds=5.0)
    await line.come("running")
    await line.come("new", ProgramCall("other"))
    await line.come("begun", ProgramCall("s"))
    for _ in range(3):
        await line.end()
    assert line.served == ["first", "running", *expected]


async def test_under_pressure_nobody_starves() -> None:
    line = Line()
    line.limiter.pressed = lambda: True
    line.limiter.update(line.settings.model_copy(update={"queue_timeout": 20.0}))
    await line.come("first", ProgramCall("s"))
    await line.end(seconds=1.0)
    await line.come("running", ProgramCall("s"))
    await line.come("new", ProgramCall("other"))
    for number in range(30):  # one program's calls keep coming, one a second
        await line.come(f"begun {number}", ProgramCall("s"))
        await line.end(seconds=1.0)
    assert line.served.index("new") <= 2 + 20


async def test_the_time_that_a_workflow_still_takes_is_learned() -> None:
    line = Line()
    for number in range(3):
        for final in (False, True):
            await line.come("past", ProgramCall(f"p{number}", "flow", "last" if final else "early", None, final))
            await line.end(seconds=30.0)
    line.served.clear()
    await line.come("running")
    await line.come("nearly done", ProgramCall("x", "flow", "last", 100.0))
    await line.come("only begun", ProgramCall("y", "flow", "early", 110.0))
    for _ in range(3):
        await line.end()
    assert line.served == ["running", "only begun", "nearly done"]


async def test_requests_that_get_no_place_teach_nothing() -> None:
    """Of an overload, most of what a workflow sends: it would seem to need no time at all."""
    line = Line(max_queued=1)
    for number in range(3):
        for final in (False, True):
            await line.come("past", ProgramCall(f"p{number}", "flow", "last" if final else "early", None, final))
            await line.end(seconds=30.0)
    await line.come("running")
    await line.come("leaves", ProgramCall("z", "flow", "early"))
    for number in range(30):
        await line.come("refused", ProgramCall(f"r{number}", "flow", "early"))
    line.tasks[-31].cancel()
    results = await asyncio.gather(*line.tasks[-31:], return_exceptions=True)
    assert [type(one) for one in results] == [asyncio.CancelledError, *[OverloadedError] * 30]
    await line.end(seconds=400.0)  # after which programs count as over
    line.limiter.update(line.settings.model_copy(update={"max_queued": 10}))
    line.served.clear()
    await line.come("running")
    await line.come("nearly done", ProgramCall("x", "flow", "last", 100.0))
    await line.come("only begun", ProgramCall("y", "flow", "early", 110.0))
    for _ in range(3):
        await line.end()
    assert line.served == ["running", "only begun", "nearly done"]


async def test_how_long_a_request_can_be_overtaken_follows_the_settings() -> None:
    line = Line()
    line.limiter.update(line.settings.model_copy(update={"queue_timeout": 20.0}))
    await line.come("running")
    await line.come("patient", ProgramCall("s1", deadline_s=400.0))
    line.now += 11.0
    await line.come("urgent", ProgramCall("s2", deadline_s=1.0))
    for _ in range(3):
        await line.end()
    assert line.served == ["running", "patient", "urgent"]


async def test_tenants_share_by_weight_however_urgent_one_of_them_is() -> None:
    tenants = {"a": TenantLimits(weight=3), "b": TenantLimits()}
    line = Line(api_keys=tuple(ApiKey(tenant=name, key_env="X") for name in tenants), tenants=tenants)
    for number in range(40):
        await line.come("a", ProgramCall(f"a{number}"), "a")
        await line.come("b", ProgramCall(f"b{number}", deadline_s=1.0), "b")
    for _ in range(40):
        await line.end(seconds=1.0)
    shares = Counter(line.served[:40])
    assert shares["a"] == pytest.approx(30, abs=2)
    for task in line.tasks:
        task.cancel()
    await asyncio.gather(*line.tasks, return_exceptions=True)
    assert line.limiter.running == line.limiter.waiting == 0


def test_the_program_is_read_from_the_headers() -> None:
    headers = {
        "x-agentspec-session": "s",
        "x-agentspec-workflow": "w",
        "x-agentspec-step": "plan",
        "x-agentspec-deadline-s": "2.5",
        "x-dynamo-session-final": "true",
    }
    assert program_call(headers) == ProgramCall("s", "w", "plan", 2.5, True)
    assert program_call({"x-session-id": "s"}) == ProgramCall("s")
    assert program_call({"x-agentspec-workflow": "w"}) is None
    assert program_call({"x-agentspec-session": "s", "x-agentspec-deadline-s": "soon"}) is None
    assert ProgramCall(*ProgramCall("s", "w", "plan", 2.5, True).fields) == ProgramCall("s", "w", "plan", 2.5, True)
