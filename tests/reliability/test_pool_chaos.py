"""U2, U3 and U10 with real processes: engines are killed, stopped, slowed down and exchanged under open streams.

A call may end with an error only if a part of its answer had come. No engine gets a call of which another has sent a
byte. `CHAOS_RECORD=FILE` appends a line of JSON for each test: how many calls ended how, and how long after each change
a call that began then had its whole answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import FleetSettings, OpenAISettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings

PROGRAM = Path(__file__).with_name("scripted_engine.py")
FLEET = FleetSettings(open_seconds=2.0)
SIZES = [
    pytest.param(50, 4.0, id="50 streams", marks=pytest.mark.slow),
    pytest.param(200, 20.0, id="200 streams", marks=pytest.mark.long),
]
pytestmark = [
    pytest.mark.reliability,
    pytest.mark.skipif(sys.platform == "darwin", reason="a Mac has one loopback address only"),
]


@pytest.fixture(autouse=True)
def often_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.backends.pool.fleet.INTERVAL_SECONDS", 0.5)
    monkeypatch.setattr("agentspec.backends.pool.servers.DISCOVERY_SECONDS", 0.5)


@dataclass
class Engines:
    """Engines at addresses of their own, all at the same port."""

    folder: Path
    port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, mode: str = "plain") -> None:
        number = int(name[1:])
        command = [sys.executable, PROGRAM, f"127.0.0.{number}", str(self.port), self.folder / "log", name, mode]
        self.processes[name] = subprocess.Popen(command)
        while not self.answers(name):
            assert self.processes[name].poll() is None

    def answers(self, name: str) -> bool:
        try:
            socket.create_connection((f"127.0.0.{name[1:]}", self.port), 1).close()
        except OSError:
            return False
        return True

    def signal(self, name: str, sent: signal.Signals) -> None:
        self.processes[name].send_signal(sent)

    def urls(self, *names: str) -> str:
        return "".join(f"http://127.0.0.{name[1:]}:{self.port}/v1\n" for name in names)

    def events(self) -> list[tuple[int, str, str, str]]:
        lines = (self.folder / "log").read_text().splitlines()
        return sorted((int(at), what, call, name) for at, what, call, name in (line.split() for line in lines))

    def begun(self) -> Counter[str]:
        return Counter(name for _, what, _, name in self.events() if what == "begin")

    def sent_twice(self) -> list[str]:
        """The calls that an engine got after another one had sent a byte of their answer."""
        answered: set[str] = set()
        twice = []
        for _, what, call, _ in self.events():
            if what == "byte":
                answered.add(call)
            elif call in answered:
                twice.append(call)
        return twice

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    with socket.create_server(("0.0.0.0", 0)) as listening:
        port = listening.getsockname()[1]
    started = Engines(tmp_path, port)
    try:
        yield started
    finally:
        started.end()


@dataclass
class Clients:
    """So many clients that ask one call after the other. `outcomes` counts how calls ended."""

    url: str
    count: int
    outcomes: Counter[str] = field(default_factory=Counter)
    stopped: bool = False
    numbers: int = 0
    limit: float = 120.0
    storing: int = 0
    """So many of them ask `/v1/responses`, which keeps its answers."""
    kept: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """The answers that say they are stored, and those that say they are not."""
    whole: list[tuple[float, float]] = field(default_factory=list)
    """When each whole answer was asked for, and when it had ended."""
    changes: list[float] = field(default_factory=list)

    def change(self) -> None:
        """Something is taken away now, or given back."""
        self.changes.append(time.monotonic())

    def recovery(self) -> float:
        """The most seconds from a change to the end of the first whole answer that was asked for after it."""
        ended = [[end for begin, end in self.whole if begin >= change] for change in self.changes]
        return max((min(ends) - change for change, ends in zip(self.changes, ended, strict=True) if ends), default=0.0)

    async def run(self) -> None:
        await asyncio.gather(*(self._ask_on(number < self.storing) for number in range(self.count)))

    async def _ask_on(self, storing: bool) -> None:
        ask = self._stored if storing else self._outcome
        while not self.stopped:
            self.numbers += 1
            begun = time.monotonic()
            outcome = await ask(f"c{self.numbers}")
            self.outcomes[outcome] += 1
            if outcome == "whole":
                self.whole.append((begun, time.monotonic()))

    async def _stored(self, call: str) -> str:
        body = {"model": "m", "input": call, "user": call, "stream": True}
        status, content = await self._post("/v1/responses", body)
        if b"event: response.completed" not in content:
            return f"lost: {status} {content[:200]!r}"
        ended = json.loads(content.split(b"event: response.completed\ndata: ")[1].split(b"\n")[0])["response"]
        (self.kept if ended["store"] else self.left).append(ended["id"])
        return "whole"

    async def _outcome(self, call: str) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": call}], "user": call, "stream": True}
        status, content = await self._post("/v1/chat/completions", body)
        if content.endswith(b"data: [DONE]\n\n"):
            return "whole"
        begun = b'"content": "x"' in content and content.count(b'"error"') == 1
        return "broken off after its begin" if begun else f"lost: {status} {content[:200]!r}"

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body of an answer. By hand: a client's library would take most of the machine for 200 streams."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json"
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(f"{head}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
            async with asyncio.timeout(self.limit):
                answer, _, content = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
            await writer.wait_closed()
        status = int(answer.split()[1]) if answer else 0
        return status, unchunked(content) if b"transfer-encoding: chunked" in answer.lower() else content


def unchunked(data: bytes) -> bytes:
    """The body that chunks hold; what there is of one that was cut."""
    pieces, at = [], 0
    while (line := data.find(b"\r\n", at)) > 0 and (size := int(data[at:line], 16)):
        pieces.append(data[line + 2 : line + 2 + size])
        at = line + 2 + size + 2
    return b"".join(pieces)


Chaos = Callable[[], None]


def loaded(clients: Clients, chaos: Chaos) -> Clients:
    """The clients, after they asked while `chaos` happened."""
    thread = threading.Thread(target=lambda: asyncio.run(clients.run()))
    thread.start()
    try:
        chaos()
    finally:
        clients.stopped = True
        thread.join(180)
    assert not thread.is_alive()
    return clients


def told(fault: str, clients: Clients, running: Any = None, back: float | None = None) -> Counter[str]:
    """How calls ended, which is also appended to the record; `back` is after how many seconds a member had a call."""
    outcomes = clients.outcomes
    retried = None if running is None else sum(one.retries for one in running.runtime.fleet.samples())
    lost = sum(count for outcome, count in outcomes.items() if outcome.startswith("lost"))
    figures = {"whole": outcomes["whole"], "broken off": outcomes["broken off after its begin"], "lost": lost}
    usual = statistics.median(end - begin for begin, end in clients.whole)
    times = {"an answer takes": round(usual, 2), "flows again after": round(clients.recovery(), 2)}
    times |= {"member back after": round(back, 2)} if back is not None else {}
    if record := os.environ.get("CHAOS_RECORD"):
        with open(record, "a") as file:
            line: dict[str, Any] = {"fault": fault, "streams": clients.count, **figures, "retried": retried, **times}
            file.write(json.dumps({**line, "load": round(os.getloadavg()[0], 1)}) + "\n")
    if clients.count > 50:  # the long form: generous, since the machine may be busy
        assert clients.recovery() < 60
    return outcomes


def settings(**backend: Any) -> Settings:
    up = OpenAISettings(server_kind="other", **backend)
    models = {"m": ModelSettings(backend="up", placement="round_robin")}
    return Settings(server=ServerSettings(max_concurrent=1000), backends={"up": up}, models=models, fleet=FLEET)


@pytest.mark.parametrize(("streams", "seconds"), SIZES)
def test_u3_engines_that_are_killed_lose_nothing_that_had_not_begun(
    gateway: Any, engines: Engines, tmp_path: Path, streams: int, seconds: float
) -> None:
    for name in ("e1", "e2", "e3"):
        engines.start(name)
    running = gateway({}, settings(base_urls=engines.urls("e1", "e2", "e3").split()))
    after: list[int] = []
    back: list[float] = []
    clients = Clients(running.url, streams)

    def chaos() -> None:
        for _ in range(2):
            time.sleep(seconds / 4)
            clients.change()
            engines.signal("e1", signal.SIGKILL)
            engines.processes["e1"].wait()
            time.sleep(seconds / 4)
            after.append(engines.begun()["e1"])
            engines.start("e1")
            clients.change()
            limit = seconds + 60
            while engines.begun()["e1"] == after[-1] and limit > 0:
                time.sleep(0.1)
                limit -= 0.1
            back.append(time.monotonic() - clients.changes[-1])

    outcomes = told("an engine of three is killed, twice", loaded(clients, chaos), running, max(back))
    assert outcomes.keys() <= {"whole", "broken off after its begin"}, outcomes
    assert outcomes["whole"] > streams and 0 < outcomes["broken off after its begin"] <= 2 * streams
    assert engines.sent_twice() == [] and engines.begun()["e1"] > after[-1]


@pytest.mark.parametrize(("streams", "seconds"), SIZES)
def test_u10_an_engine_that_is_stopped_for_a_while_breaks_no_call(
    gateway: Any, engines: Engines, until: Any, streams: int, seconds: float
) -> None:
    for name in ("e1", "e2", "e3"):
        engines.start(name)
    running = gateway({}, settings(base_urls=engines.urls("e1", "e2", "e3").split()))
    clients = Clients(running.url, streams)

    def is_seen() -> bool:
        [sample] = [one for one in running.runtime.fleet.samples() if one.member.startswith("up/127.0.0.1:")]
        return sample.state == "unhealthy"

    def chaos() -> None:
        time.sleep(1)
        clients.change()
        engines.signal("e1", signal.SIGSTOP)
        time.sleep(seconds)
        until(is_seen)
        engines.signal("e1", signal.SIGCONT)
        clients.change()
        time.sleep(2)

    outcomes = told("an engine of three is stopped for a while", loaded(clients, chaos), running)
    assert outcomes.keys() == {"whole"}, outcomes
    assert engines.sent_twice() == []


@pytest.mark.parametrize(("streams", "seconds"), SIZES)
def test_u9_an_engine_of_a_byte_a_second_keeps_only_its_own_calls_waiting(
    gateway: Any, engines: Engines, streams: int, seconds: float
) -> None:
    engines.start("e1", "loris")
    engines.start("e2")
    both = settings(base_urls=engines.urls("e1", "e2").split())
    both = both.model_copy(update={"models": {"m": ModelSettings(backend="up", placement="least_loaded")}})
    running = gateway({}, both)
    clients = loaded(Clients(running.url, streams), lambda: time.sleep(seconds))
    outcomes = told("an engine of two sends a byte a second", clients, running)
    assert outcomes.keys() == {"whole"} and engines.sent_twice() == []
    begun = engines.begun()
    assert begun["e2"] > begun["e1"]  # whose calls pile up


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize(("streams", "seconds"), SIZES)
def test_engines_of_unequal_speed_take_calls_as_they_finish_them(
    gateway: Any, engines: Engines, streams: int, seconds: float, pairs: int
) -> None:
    quick = [f"e{number}" for number in range(1, pairs + 1)]
    slow = [f"e{number}" for number in range(pairs + 1, 2 * pairs + 1)]
    for name in quick + slow:
        engines.start(name, "plain" if name in quick else "slow")
    both = settings(base_urls=engines.urls(*quick, *slow).split())
    both = both.model_copy(update={"models": {"m": ModelSettings(backend="up", placement="least_loaded")}})
    running = gateway({}, both)
    clients = loaded(Clients(running.url, streams), lambda: time.sleep(seconds))
    outcomes = told(f"half of {2 * pairs} engines five times as slow", clients, running)
    begun = engines.begun()
    assert outcomes.keys() == {"whole"} and engines.sent_twice() == []
    assert min(begun[name] for name in quick) > max(begun[name] for name in slow)


@pytest.mark.parametrize(("streams", "seconds"), SIZES)
def test_a_name_whose_addresses_change_moves_new_calls_and_ends_none(
    gateway: Any,
    engines: Engines,
    until: Any,
    monkeypatch: pytest.MonkeyPatch,
    streams: int,
    seconds: float,
) -> None:
    for name in ("e1", "e2", "e3"):
        engines.start(name)
    addresses = ["127.0.0.1", "127.0.0.2"]
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host != "engines.test":
            return real(host, port, *arguments, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    running = gateway({}, settings(base_url=f"http://engines.test:{engines.port}/v1", resolve="a"))
    clients = Clients(running.url, streams)

    def chaos() -> None:
        time.sleep(seconds / 2)
        clients.change()
        addresses[:] = ["127.0.0.2", "127.0.0.3"]
        until(lambda: engines.begun()["e3"])
        time.sleep(seconds / 2)

    outcomes = told("the name has another address", loaded(clients, chaos), running)
    assert outcomes.keys() == {"whole"} and engines.sent_twice() == []
    assert set(engines.begun()) == {"e1", "e2", "e3"}


@contextmanager
def gateway_process(folder: Path, urls: list[str], path: str, **environment: str) -> Iterator[str]:
    """A gateway in a process of its own, which keeps stored answers in the database at `path`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    file = folder / "agentspec.toml"
    file.write_text(
        f"[server]\nport = {port}\nmax_concurrent = 1000\n[cache]\npath = {json.dumps(path)}\n"
        f'[backends.up]\nkind = "openai"\nbase_urls = {json.dumps(urls)}\nserver_kind = "other"\n'
        '[models.m]\nbackend = "up"\n'
    )
    command = [sys.executable, "-c", "from agentspec.cli import app; app()", "serve", "--config", str(file)]
    process = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        while not ready(url):
            assert process.poll() is None
        yield url
    finally:
        process.terminate()
        assert process.wait(60) == 0


def ready(url: str) -> bool:
    time.sleep(0.1)
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def found(url: str, answers: list[str]) -> int:
    """How many of the stored answers can be read."""
    with httpx.Client(base_url=url) as client:
        return sum(client.get(f"/v1/responses/{answer}").status_code == 200 for answer in answers)


def store_is_lost(fault: str, url: str, streams: int, seconds: float, lose: Chaos, restore: Chaos, until: Any) -> None:
    """No call ends because nothing can be kept for a while, what says it is stored is, and later all is again."""
    clients = Clients(url, streams, storing=streams // 2)
    back: list[float] = []

    def chaos() -> None:
        until(lambda: clients.kept)
        time.sleep(1)
        clients.change()
        lose()
        time.sleep(seconds)
        until(lambda: clients.left)
        restore()
        clients.change()
        again = len(clients.kept)
        until(lambda: len(clients.kept) > again)
        back.append(time.monotonic() - clients.changes[-1])
        until(lambda: len(clients.kept) > again + streams)

    outcomes = told(fault, loaded(clients, chaos), back=back[0])
    assert outcomes.keys() == {"whole"}, outcomes
    assert found(url, clients.kept) == len(clients.kept)


@pytest.mark.parametrize(("streams", "seconds"), SIZES)
def test_postgresql_that_restarts_breaks_no_call(
    engines: Engines, server: Any, postgres: str, until: Any, tmp_path: Path, streams: int, seconds: float
) -> None:
    engines.start("e1")
    engines.start("e2")
    with gateway_process(tmp_path, engines.urls("e1", "e2").split(), postgres) as url:
        try:
            store_is_lost("PostgreSQL is stopped for a while", url, streams, seconds, server.stop, server.start, until)
        finally:
            server.start()
    assert engines.sent_twice() == []


@pytest.mark.parametrize(("streams", "seconds"), SIZES)
def test_a_full_disk_breaks_no_call(
    engines: Engines, preload: Path, until: Any, tmp_path: Path, streams: int, seconds: float
) -> None:
    engines.start("e1")
    engines.start("e2")
    full, cache = tmp_path / "full", tmp_path / "cache"
    faults = {"FAULT_FULL": str(full), "LD_PRELOAD": str(preload)}
    with gateway_process(tmp_path, engines.urls("e1", "e2").split(), str(cache), **faults) as url:
        store_is_lost("the disk is full for a while", url, streams, seconds, full.touch, full.unlink, until)
    assert engines.sent_twice() == []
