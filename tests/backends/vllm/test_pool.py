"""Two real vLLM servers as a pool: sessions stay, and a server that is killed, stopped or slow takes no call with it.

`CHAOS_RECORD=FILE` appends a line of JSON for each fault.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from agentspec.backends.model_store import locate
from agentspec.backends.settings import OpenAISettings
from agentspec.benchmarks.vllm.engine import find_environment
from agentspec.proxy import create_app
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from tests.vllm_server import SUFFIX, VllmServer

ENVIRONMENT = find_environment(Path(__file__).parents[3])
STOPPED = 20.0  # seconds
CHAT = "/v1/chat/completions"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(ENVIRONMENT is None, reason="no vLLM: run .ci/vllm-env, or set AGENTSPEC_VLLM_ENV"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmServer]]:
    model, folder = locate("smollm2-135m"), tmp_path_factory.mktemp("pair")
    if model is None or ENVIRONMENT is None:
        pytest.skip("the default model is not there: run agentspec model fetch smollm2-135m")
    variables = {"AGENTSPEC_CACHE_PATH": str(folder / "cache")}
    made = [
        VllmServer(ENVIRONMENT, model.folder, folder / f"{number}.log", SUFFIX, variables, ("--enforce-eager",))
        for number in range(2)
    ]
    for server in made:
        server.start_seconds = 900.0
    try:
        yield made
    finally:
        for server in made:
            server.stop()


@pytest.fixture
def servers(pair: list[VllmServer]) -> list[VllmServer]:
    """Two that run, each on a core of its own where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        for number, server in enumerate(pair):
            if not server.running:
                os.sched_setaffinity(0, {cores[number % len(cores)]})  # processes inherit it
                server.launch()
    finally:
        os.sched_setaffinity(0, cores)
    for server in pair:
        server.wait()
    return pair


@dataclass
class Clients:
    """Sessions that ask one call after the other of a gateway over `urls`. `answered`: when each call began and ended,
    and which server it was that answered."""

    client: TestClient
    members: Any
    answered: list[tuple[float, float, str]] = field(default_factory=list)

    def say(self, session: int, tokens: int = 48, *, stream: bool = False) -> str:
        """The server that gave the whole answer."""
        text = {"role": "user", "content": f"Count from {session}."}
        body = {"model": "m", "messages": [text], "max_tokens": tokens, "temperature": 0, "stream": stream}
        begun = time.monotonic()
        answer = self.client.post(CHAT, json=body, headers={"x-agentspec-session": f"s{session}"})
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n") if stream else answer.json()["choices"][0]["message"]["content"]
        member = answer.headers["x-agentspec-member"]
        self.answered.append((begun, time.monotonic(), member))
        return member

    def state(self, number: int) -> str:
        return str(self.members()[number].state)

    def begun_after(self, moment: float) -> list[str]:
        """The servers that gave answers which were asked for after `moment`."""
        return [member for begun, _, member in list(self.answered) if begun > moment]

    def flows_again(self, change: float) -> float:
        """Seconds from `change` to the end of the first whole answer that was asked for after it."""
        return min(end for begun, end, _ in self.answered if begun >= change) - change


@contextmanager
def asking(*urls: str) -> Iterator[Clients]:
    backend = OpenAISettings.model_validate({"base_urls": [f"{url}/v1" for url in urls], "server_kind": "vllm"})
    models = {"m": ModelSettings(backend="pair", upstream_model="model")}
    settings = Settings(backends={"pair": backend}, models=models)
    runtime = Runtime(settings)
    runtime.start()
    with TestClient(create_app(runtime, settings), base_url="http://127.0.0.1") as client:
        assert runtime.fleet is not None
        yield Clients(client, runtime.fleet.samples)


def wait_for(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.1)


def served(servers: list[VllmServer]) -> float:
    return sum(server.metric("vllm:request_success_total") for server in servers)


def record(fault: str, clients: Clients, **figures: float) -> None:
    if path := os.environ.get("CHAOS_RECORD"):
        line = {"fault": fault, "whole": len(clients.answered), **figures, "load": os.getloadavg()[0]}
        with open(path, "a") as file:
            file.write(
                json.dumps({name: round(one, 1) if isinstance(one, float) else one for name, one in line.items()})
                + "\n"
            )


def test_calls_of_sessions_outlive_a_server_that_is_killed(servers: list[VllmServer]) -> None:
    with asking(*(server.url for server in servers)) as clients, ThreadPoolExecutor(8) as threads:
        first = list(threads.map(clients.say, range(8)))
        assert list(map(clients.say, range(8))) == first and len(set(first)) == 2
        asked = [threads.submit(clients.say, session) for session in (*range(8), *range(8))]
        servers[0].kill()
        assert all(one.result() for one in asked)  # no call had begun to stream, so that none may fail
        assert len({clients.say(session) for session in range(8)}) == 1


def test_a_server_that_is_stopped_for_a_while_loses_no_call(servers: list[VllmServer]) -> None:
    """Those that wait in it are answered once it goes on, and are sent to no other; new ones go elsewhere meanwhile."""
    before, stop = served(servers), threading.Event()

    def ask_on(session: int) -> None:
        while not stop.is_set():
            clients.say(session, 16)

    with asking(*(server.url for server in servers)) as clients, ThreadPoolExecutor(8) as threads:
        [left, other] = [f"pair/{server.url.removeprefix('http://')}" for server in servers]
        assert set(threads.map(clients.say, range(8))) == {left, other}
        running: list[Future[None]] = [threads.submit(ask_on, session) for session in range(8)]
        try:
            servers[0].signal(signal.SIGSTOP)
            stopped = time.monotonic()
            wait_for(lambda: clients.state(0) == "unhealthy")
            noticed = time.monotonic()
            time.sleep(max(0.0, STOPPED - (noticed - stopped)))
            wait_for(lambda: bool(clients.begun_after(noticed)))  # at once, unless the machine is very busy
            waited = clients.members()[0].in_flight
        finally:
            meanwhile = clients.begun_after(noticed)
            servers[0].signal(signal.SIGCONT)
            goes_on = time.monotonic()
        wait_for(lambda: clients.state(0) == "ready" and bool(clients.begun_after(goes_on)))
        ready = time.monotonic()
        wait_for(lambda: left in clients.begun_after(goes_on))
        stop.set()
        assert [one.result() for one in running] == [None] * 8
        assert waited > 0 and set(meanwhile) == {other}
        assert served(servers) - before == len(clients.answered)
        times = {"noticed": noticed - stopped, "ready": ready - goes_on, "waited": waited}
        flows = max(clients.flows_again(stopped), clients.flows_again(goes_on))
        record("stopped for 20 s", clients, **times, **{"flows again": flows})
