"""U2, U3, U9 and U10: servers of a pool fail, hang, slow down and come back under open streams, by a clock that jumps.

One server of three is always well. So a call may end with an error only if a part of its answer had come, at least its
head, or if the fault of its server does not show whether the call is being computed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import FleetSettings, OpenAISettings
from agentspec.placement import POLICIES
from agentspec.proxy.app import create_app
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings

pytestmark = pytest.mark.reliability

SECONDS, CLIENTS, TOKENS = 12.0, 5, 10
PIECE = b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": null}]}\n\n'
END = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
MODES = ["well", "killed", "stopped", "503", "429", "500", "cut", "slow", "unhealthy"]
LOSING = {"500", "cut", "killed"}
Schedule = list[tuple[float, int, str]]


class Engine(httpx.AsyncByteStream):
    """A server whose `mode` changes. `log` has a line for each call that arrives, and one for its first byte."""

    def __init__(self, name: str, log: list[tuple[str, str, str]]) -> None:
        self.name, self.log, self.mode = name, log, "well"

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.mode == "killed":
            raise httpx.ConnectError("refused")
        while self.mode == "stopped":
            await asyncio.sleep(0.1)
        if request.url.path == "/health":
            return httpx.Response(503 if self.mode == "unhealthy" else 200)
        call = json.loads(request.content)["user"]
        self.log.append(("begin", call, self.name))
        if self.mode.isdigit():
            headers = {"retry-after": "1"} if self.mode == "429" else {}
            return httpx.Response(int(self.mode), content=b'{"error": {"message": "no"}}', headers=headers)
        headers = {"content-type": "text/event-stream"}
        return httpx.Response(200, headers=headers, stream=Stream(self.answer(call)))

    async def answer(self, call: str) -> AsyncIterator[bytes]:
        for number in range(TOKENS):
            await asyncio.sleep(0.5 if self.mode == "slow" else 0.05)
            while self.mode == "stopped":
                await asyncio.sleep(0.1)
            if self.mode == "killed" or (self.mode == "cut" and number == 3):
                raise httpx.ReadError("reset")
            if not number:
                self.log.append(("byte", call, self.name))
            yield PIECE
        yield END


class Stream(httpx.AsyncByteStream):
    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self.pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.pieces


class Gateway:
    """The whole gateway, called without a server, in front of three engines."""

    def __init__(self, placement: Any) -> None:
        self.log: list[tuple[str, str, str]] = []
        self.engines = [Engine(f"e{number}", self.log) for number in range(3)]
        self.outcomes: Counter[str] = Counter()
        self.calls = 0
        up = {
            one.name: OpenAISettings(base_url=f"http://{one.name}/v1", server_kind="other")  # type: ignore[arg-type]
            for one in self.engines
        }
        models = {"m": ModelSettings(backends=tuple(up), placement=placement)}
        chosen = Settings(backends=up, models=models, fleet=FleetSettings(open_seconds=2.0))  # type: ignore[arg-type]
        ready = {
            one.name: OpenAIBackend(up[one.name], name=one.name, transport=httpx.MockTransport(one))
            for one in self.engines
        }
        self.runtime = Runtime(chosen, backends=ready)  # type: ignore[arg-type]
        self.runtime.start()
        self.app = create_app(self.runtime, chosen)

    async def ask(self) -> str:
        """How a call ended."""
        self.calls += 1
        call = f"c{self.calls}"
        body = {"model": "m", "messages": [{"role": "user", "content": call}], "user": call, "stream": True}
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/chat/completions"}
        scope |= {"query_string": b"", "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]}
        await self.app(scope, incoming.get, send)
        content = b"".join(message.get("body", b"") for message in sent)
        if sent[0]["status"] != 200:
            return f"lost: {sent[0]['status']}"
        if content == PIECE * TOKENS + END:
            return "whole"
        begun = content.replace(PIECE, b"").startswith(b'data: {"error"') and content.count(b"data:") <= TOKENS + 1
        return "broken off" if begun else f"wrong: {content!r}"

    async def client(self) -> None:
        while asyncio.get_running_loop().time() < SECONDS:
            self.outcomes[await self.ask()] += 1


async def chaos(schedule: Schedule, placement: str) -> Gateway:
    """Clients ask while the schedule sets modes; then all engines are well, and soon the clients ask again."""
    gateway = Gateway(placement)
    loop = asyncio.get_running_loop()
    for at, number, mode in schedule:
        loop.call_at(at, setattr, gateway.engines[number], "mode", mode)
    for engine in gateway.engines:
        loop.call_at(SECONDS, setattr, engine, "mode", "well")
    await asyncio.gather(*(gateway.client() for _ in range(CLIENTS)))
    await asyncio.sleep(10)
    before = len(gateway.log)
    again = [outcome for _ in range(4) for outcome in await asyncio.gather(*(gateway.ask() for _ in range(CLIENTS)))]
    assert set(again) == {"whole"}
    after = Counter(name for what, _, name in gateway.log[before:] if what == "begin")
    assert len(after) == 3 or placement == "workflow"  # whatever happened, each engine takes calls again
    assert gateway.runtime.fleet is not None
    assert all(sample.in_flight == 0 and sample.state == "ready" for sample in gateway.runtime.fleet.samples())
    await gateway.runtime.fleet.aclose()
    return gateway


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.floats(0, SECONDS - 1), st.sampled_from([1, 2]), st.sampled_from(MODES)), max_size=8),
    st.sampled_from(sorted(POLICIES)),
)
@example(
    [(1.0, 1, "killed"), (5.0, 1, "well"), (7.0, 1, "killed"), (7.0, 2, "killed"), (10.0, 2, "well")], "round_robin"
)
@example([(1.0, 1, "stopped"), (9.0, 1, "well"), (10.0, 2, "unhealthy")], "least_loaded")
@example([(1.0, 1, "500"), (1.0, 2, "cut"), (8.0, 1, "429"), (9.0, 2, "503")], "least_loaded")
def test_no_call_is_lost_that_another_server_can_answer(
    in_virtual_time: Any, schedule: Schedule, placement: str
) -> None:
    gateway = in_virtual_time(chaos(schedule, placement))
    modes = Counter(mode for _, _, mode in schedule)
    allowed = {"whole"} | ({"lost: 500"} if modes["500"] else set())
    allowed |= {"broken off"} if modes["cut"] or modes["killed"] else set()
    assert {*gateway.outcomes} <= allowed, gateway.outcomes
    failed = gateway.outcomes.total() - gateway.outcomes["whole"]
    assert failed <= 25 * sum(modes[mode] for mode in LOSING), "a server that fails is left out"
    answered: dict[str, str] = {}
    begun: Counter[str] = Counter()
    for what, call, name in gateway.log:
        if what == "byte":
            answered[call] = name
        else:
            begun[call] += 1
            assert call not in answered, "no server gets a call of which another has sent a byte"
    assert begun.most_common(1)[0][1] <= 3


def test_a_slow_server_delays_only_its_own_calls(in_virtual_time: Any) -> None:
    gateway = in_virtual_time(chaos([(0.0, 1, "slow"), (0.0, 2, "slow")], "least_loaded"))
    assert gateway.outcomes.keys() == {"whole"}
    begun = Counter(name for what, _, name in gateway.log if what == "begin")
    assert begun["e0"] > begun["e1"] and begun["e0"] > begun["e2"]
