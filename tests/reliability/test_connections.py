"""C2-C6 and C9: clients that open too much, send too slowly, do not read, leave, or speak another HTTP than ours."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import anyio
import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Delta, GenerateRequest

pytestmark = pytest.mark.reliability

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
STREAMED = {**BODY, "stream": True}
MOST_BUFFERED = 64 << 10
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def sizes(quick: int, full: int) -> Any:
    return pytest.mark.parametrize("count", [quick, pytest.param(full, marks=pytest.mark.long)])


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def ask(url: str, body: object, buffer: int = 0) -> socket.socket:
    """A connection on which `body` was posted; `buffer` bounds what its end receives unread."""
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(60)
    connection.connect(address(url))
    content = json.dumps(body).encode()
    connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(content) + content)
    return connection


def rest(connection: socket.socket) -> bytes:
    """What the server sends until it closes."""
    received = b""
    with suppress(OSError):
        while more := connection.recv(65536):
            received += more
    return received


def answered(connection: socket.socket) -> int:
    """Read one answer to its end; returns its status."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


# ---- C2: many streams --------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@sizes(60, 1000)
def test_c2_streams_at_once_all_arrive_whole_and_leave_nothing_open(
    gateway: Any, until: Callable[..., None], count: int
) -> None:
    running = gateway({"fake": FakeBackend(Answer("word " * 20, latency=0.01))}, max_concurrent=count)
    state = running.server.server_state

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    until(lambda: not state.connections)
    before = descriptors()
    with ExitStack() as stack:
        streams = [stack.enter_context(ask(running.url, STREAMED)) for _ in range(count)]
        for stream in streams:
            response = http.client.HTTPResponse(stream)
            response.begin()
            assert (response.status, response.read().count(b"word")) == (200, 20)
    until(lambda: not state.connections and not state.tasks)
    until(lambda: descriptors() <= before)
    assert running.app.slots.running == running.app.budget.memory.total == 0


# ---- C3: slow readers --------------------------------------------------------------------------------------------


class Endless:
    """Produces a kilobyte at a time for as long as somebody takes it."""

    def __init__(self) -> None:
        self.fake = FakeBackend()
        self.capabilities = self.fake.capabilities
        self.active = self.begun = 0

    async def generate(self, request: GenerateRequest) -> Any:
        self.active, self.begun = self.active + 1, self.begun + 1
        try:
            while True:
                await anyio.sleep(0)
                yield Delta(text="x" * 1000)
        finally:
            self.active -= 1

    async def aclose(self) -> None: ...


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads, readers and answers that wait for memory have a second, as no setting can say."""
    for name in ("connections.HEAD_SECONDS", "connections.WRITE_SECONDS", "body.budget.ANSWER_SECONDS"):
        monkeypatch.setattr(f"agentspec.proxy.{name}", 1.0)


def most_buffered(running: Any) -> int:
    connections = tuple(running.server.server_state.connections)
    return max((one.transport.get_write_buffer_size() for one in connections), default=0)


@pytest.mark.usefixtures("brief")
@sizes(10, 200)
def test_c3_slow_readers_hold_a_bounded_buffer_and_are_cut_off(
    gateway: Any, until: Callable[..., None], count: int
) -> None:
    backend = Endless()
    running = gateway({"fake": backend})
    with ExitStack() as stack:
        readers, highest, begun = [], 0, time.monotonic()
        for _ in range(count):
            readers.append(stack.enter_context(ask(running.url, STREAMED, 4096)))
            highest = max(highest, most_buffered(running))
        while (backend.begun < count or running.server.server_state.connections) and time.monotonic() - begun < 100:
            highest = max(highest, most_buffered(running))
            for reader in readers[: count // 2]:  # the others never read
                with suppress(OSError):
                    reader.recv(10)
            time.sleep(0.1)
        assert 0 < highest <= MOST_BUFFERED, highest
        until(lambda: backend.active == 0)
        until(lambda: running.app.slots.running == 0)
    assert running.metric("agentspec_requests_total", outcome="cancelled", model="fake", route=CHAT) == count


def upstream_settings(server: Any, **options: Any) -> Settings:
    backends = {"up": OpenAISettings(base_url=server.url, server_kind="other")}  # type: ignore[arg-type]
    return Settings(server=ServerSettings(**options), backends=backends)


@pytest.mark.usefixtures("brief")
def test_c3_a_whole_answer_is_written_in_pieces(gateway: Any, upstream: Any) -> None:
    content = b'{"data":"' + b"x" * (6 << 20) + b'"}'
    server = upstream(lambda request: request.answer(content))
    running = gateway({}, upstream_settings(server))
    with ask(running.url, BODY, 4096) as reader:
        assert reader.recv(1)
        highest = 0
        while running.server.server_state.connections:
            highest = max(highest, most_buffered(running))
            time.sleep(0.01)
        assert 0 < highest <= MOST_BUFFERED
    answer = httpx.post(running.url + CHAT, json=BODY, timeout=60)
    assert answer.content == content and answer.headers["content-length"] == str(len(content))


def test_c3_whole_answers_at_once_are_bounded_in_memory(
    gateway: Any, upstream: Any, until: Callable[..., None]
) -> None:
    """There is room for two of four answers: two wait, with their upstreams, until others are read. None is lost."""
    content = b'{"data":"' + b"x" * (4 << 20) + b'"}'
    server = upstream(lambda request: request.answer(content))
    running = gateway({}, upstream_settings(server, max_body_memory=18 << 20))
    budget = running.app.budget
    with ExitStack() as stack:
        readers = [stack.enter_context(ask(running.url, BODY, 4096)) for _ in range(2)]
        until(lambda: budget.memory.total > 7 << 20)
        readers += [stack.enter_context(ask(running.url, BODY, 4096)) for _ in range(2)]
        until(lambda: len(server.requests) == 4)
        assert budget.memory.total < 9 << 20
        for reader in readers:
            assert answered(reader) == 200 and budget.memory.total < 9 << 20
    until(lambda: running.app.slots.running == 0)
    assert budget.memory.total == 0


@pytest.mark.usefixtures("brief")
def test_c3_answers_without_a_length_end_in_503_and_not_in_memory(
    gateway: Any, upstream: Any, until: Callable[..., None]
) -> None:
    content = b'{"data":"' + b"x" * (2 << 20) + b'"}'

    def script(request: Any) -> None:
        request.head(content_type="application/json")
        request.send(content)

    running = gateway({}, upstream_settings(upstream(script), max_body_memory=6 << 20))

    def post(_: int) -> httpx.Response:
        return httpx.post(running.url + CHAT, json=BODY, timeout=60)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(post, range(8)))
    refused = [one for one in answers if one.status_code != 200]
    assert all(one.status_code == 503 and one.json()["error"]["code"] == "answer_memory" for one in refused)
    assert all(one.headers["retry-after"] == "1" for one in refused)
    until(lambda: running.app.slots.running == 0)
    assert running.app.budget.memory.total == 0 and post(0).content == content


# ---- C4: disconnects ---------------------------------------------------------------------------------------------


@sizes(60, 1000)
@pytest.mark.parametrize("kind", ["local", "upstream"])
def test_c4_a_disconnect_at_any_point_leaves_nothing(
    gateway: Any, upstream: Any, until: Callable[..., None], kind: str, count: int
) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
    upstream_left = []

    def script(request: Any) -> None:
        request.head()
        with suppress(OSError):
            for _ in range(2000):
                request.send(event)
                time.sleep(0.01)
            return
        upstream_left.append(True)

    backend = FakeBackend(Answer("word " * 2000, latency=0.01))
    server = upstream(script)
    running = gateway({"fake": backend}) if kind == "local" else gateway({}, upstream_settings(server))
    chance = random.Random(4)
    content = json.dumps(STREAMED).encode()
    message = HEAD + b"content-length: %d\r\n\r\n" % len(content) + content
    for _ in range(count):
        with socket.create_connection(address(running.url)) as connection:
            connection.sendall(message[: chance.randrange(1, len(message)) if chance.random() < 0.3 else None])
            if chance.random() < 0.5:
                connection.settimeout(chance.choice([0.001, 0.03]))
                with suppress(OSError):
                    connection.recv(chance.randrange(1, 3000))
            if chance.random() < 0.5:  # with a reset in place of an orderly end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    state = running.server.server_state
    until(lambda: not state.connections and not state.tasks)
    assert running.app.slots.running == 0 and backend.active == 0
    until(lambda: len(upstream_left) == len(server.requests))


# ---- C5: half-open connections -----------------------------------------------------------------------------------


@sizes(60, 1500)
@pytest.mark.usefixtures("brief")
def test_c5_half_heads_disturb_no_one_and_are_closed(gateway: Any, count: int) -> None:
    running = gateway({"fake": FakeBackend("fine")})
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(address(running.url))) for _ in range(count)]
        for index, connection in enumerate(held):
            if index % 3:  # every third says nothing at all
                connection.sendall(HEAD)
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert httpx.post(running.url + CHAT, json=BODY).status_code == 200
        for index, connection in enumerate(held):
            connection.settimeout(60)
            assert rest(connection).startswith(b"HTTP/1.1 408 ") is bool(index % 3)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("begun", "part", "said"),
    [
        (b"", b"x-header: 1\r\n", b"no complete head"),
        (b"", b"x", b"no complete head"),
        (b"content-length: 100000\r\n\r\n{", b" ", b"server.request_timeout"),
        (b"content-length: 100000\r\n\r\n{", b"", b"server.request_timeout"),
    ],
    ids=["lines", "a line", "a body", "a body that stops"],
)
def test_c5_what_trickles_is_closed(
    gateway: Any, until: Callable[..., None], begun: bytes, part: bytes, said: bytes
) -> None:
    running = gateway({"fake": FakeBackend()}, request_timeout=1.0)
    with socket.create_connection(address(running.url), timeout=0.05) as connection:
        connection.sendall(HEAD + begun)
        received, limit = b"", time.monotonic() + 60
        while not received and time.monotonic() < limit:
            with suppress(TimeoutError):
                connection.sendall(part)
                received = connection.recv(1000)
    assert received.startswith(b"HTTP/1.1 408 ") and said in received
    until(lambda: running.app.slots.running == 0)


def test_c5_connections_over_the_limits_are_refused_and_others_served(gateway: Any, until: Callable[..., None]) -> None:
    running = gateway({"fake": FakeBackend()}, max_connections=20)
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(address(running.url))) for _ in range(20)]
        until(lambda: len(running.server.server_state.connections) == 20)
        with socket.create_connection(address(running.url), timeout=60) as refused:
            assert rest(refused).startswith(b"HTTP/1.1 503 ")
        held[0].close()
        until(lambda: len(running.server.server_state.connections) < 20)
        assert "agentspec_connections 20.0" in httpx.get(f"{running.url}/metrics").text


# ---- C6: SIGTERM under load --------------------------------------------------------------------------------------

PROGRAM = """
import sys
import anyio
from agentspec.proxy import create_app, logs
from agentspec.proxy.serving import GatewayServer
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import Answer, FakeBackend

logs.configure("INFO", sys.stdout)
settings = Settings(server=ServerSettings(port=0, drain_timeout=float(sys.argv[1])), backends={})
runtime = Runtime(settings, backends={"fake": FakeBackend(Answer("word " * int(sys.argv[2]), latency=0.1))})
GatewayServer(create_app(runtime, settings), settings).run()
print("flushed", runtime.ready, flush=True)
"""


@contextmanager
def process(words: int, drain: float) -> Iterator[Any]:
    """A gateway in a process of its own, with its `url`, and with the text that it wrote as `output()`."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-c", PROGRAM, str(drain), str(words)]
        with subprocess.Popen(command, stdout=log) as running:
            said: Any = running
            said.output = lambda: os.pread(log.fileno(), 1 << 24, 0).decode()
            try:
                limit = time.monotonic() + 100
                while '"event": "ready"' not in said.output() and time.monotonic() < limit:
                    time.sleep(0.02)
                [said.url] = re.findall(r'"url": "(http://[^"]+)/v1"', said.output())
                yield running
            finally:
                running.kill()


@pytest.mark.parametrize(
    ("words", "drain"), [(10_000, 0.2), pytest.param(20, 600.0, marks=pytest.mark.slow)], ids=["cut short", "finished"]
)
def test_c6_sigterm_finishes_streams_or_says_that_they_are_cut(words: int, drain: float) -> None:
    with process(words, drain) as running, ExitStack() as stack:
        streams = [stack.enter_context(ask(running.url, STREAMED)) for _ in range(10)]
        begun = [stream.recv(1) for stream in streams]
        whole = stack.enter_context(ask(running.url, BODY)) if words > 100 else None
        running.send_signal(signal.SIGTERM)
        answers = [first + rest(stream) for first, stream in zip(begun, streams, strict=True)]
        if whole is not None:
            assert all(b'"code":"shutting_down"' in one.rpartition(b"data: {")[2] for one in answers)
            assert rest(whole)[:13] in (b"HTTP/1.1 503 ", b"")
        else:
            assert all(one.count(b"word") == words and b"data: [DONE]" in one for one in answers)
        assert running.wait(100) == 0 and running.output().endswith("flushed False\n")


def test_c6_a_forwarded_stream_that_is_cut_short_ends_with_an_error(gateway: Any, upstream: Any) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'

    def script(request: Any) -> None:
        request.head()
        request.send(event + event[:20])  # and the rest of it never comes
        request.client_left(60)

    server = upstream(script)
    running = gateway({}, upstream_settings(server, drain_timeout=0.1))
    with ask(running.url, STREAMED) as connection:
        received = connection.recv(65536)
        while event not in received:
            received += connection.recv(65536)
        running.server.drain()
        received += rest(connection)
    body = received.partition(b"\r\n\r\n")[2]
    assert body.count(event) == 1 and b'"code":"shutting_down"' in body and body.endswith(b"0\r\n\r\n")


# ---- C9: smuggling -----------------------------------------------------------------------------------------------

CONTENT = json.dumps(BODY).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\n"
TYPE = b"content-type: application/json\r\n"
HOST = b"host: localhost\r\n"
P = POST + HOST + TYPE
LENGTH = b"content-length: %d\r\n" % len(CONTENT)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (len(CONTENT), CONTENT)
SMUGGLED = {
    "two lengths": P + LENGTH + b"content-length: 3\r\n\r\n" + CONTENT,
    "a list of lengths": P + b"content-length: 5, %d\r\n\r\n" % len(CONTENT) + CONTENT,
    "a signed length": P + b"content-length: +%d\r\n\r\n" % len(CONTENT) + CONTENT,
    "a hexadecimal length": P + b"content-length: 0x%x\r\n\r\n" % len(CONTENT) + CONTENT,
    "length and chunks": P + LENGTH + CHUNKED + b"\r\n" + CHUNK,
    "chunks and length": P + CHUNKED + LENGTH + b"\r\n" + CHUNK,
    "another coding": P + b"transfer-encoding: xchunked\r\n\r\n" + CHUNK,
    "two codings": P + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNK,
    "compressed chunks": P + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNK,
    "compressed, then chunks": P + b"transfer-encoding: gzip\r\n" + CHUNKED + b"\r\n" + CHUNK,
    "chunks of HTTP/1.0": POST.replace(b"1.1", b"1.0") + HOST + TYPE + CHUNKED + b"\r\n" + CHUNK,
    "a chunk without size": P + CHUNKED + b"\r\n\r\n" + CONTENT + b"\r\n0\r\n\r\n",
    "a chunk of a bad size": P + CHUNKED + b"\r\n%dg\r\n" % len(CONTENT) + CONTENT,
    "a negative chunk": P + CHUNKED + b"\r\n-1\r\n" + CONTENT,
    "a huge chunk": P + CHUNKED + b"\r\nfffffffffffffffff\r\n" + CONTENT,
    "a longer chunk": P + CHUNKED + b"\r\n3\r\n" + CONTENT + b"\r\n0\r\n\r\n",
    "a space in a name": P + b"x y: 1\r\n" + LENGTH + b"\r\n" + CONTENT,
    "a space after a name": P + b"content-length : %d\r\n\r\n" % len(CONTENT) + CONTENT,
    "no name": P + b": 1\r\n" + LENGTH + b"\r\n" + CONTENT,
    "no colon": P + b"nonsense\r\n" + LENGTH + b"\r\n" + CONTENT,
    "a bare return": P + b"x: 1\rcontent-length: 1\r\n" + LENGTH + b"\r\n" + CONTENT,
    "a zero byte": P + b"x: \x001\r\n" + LENGTH + b"\r\n" + CONTENT,
    "no host": POST + TYPE + LENGTH + b"\r\n" + CONTENT,
    "two hosts": POST + HOST + HOST + TYPE + LENGTH + b"\r\n" + CONTENT,
    "another host": POST + b"host: example.com\r\n" + TYPE + LENGTH + b"\r\n" + CONTENT,
    "an empty host": POST + b"host:\r\n" + TYPE + LENGTH + b"\r\n" + CONTENT,
    "a host with a user": POST + b"host: localhost@example.com\r\n" + TYPE + LENGTH + b"\r\n" + CONTENT,
    "a list of hosts": POST + b"host: localhost, example.com\r\n" + TYPE + LENGTH + b"\r\n" + CONTENT,
    "a host with a path": POST + b"host: localhost/v1\r\n" + TYPE + LENGTH + b"\r\n" + CONTENT,
    "an absolute target": POST.replace(b"/v1", b"http://example.com/v1") + HOST + TYPE + LENGTH + b"\r\n" + CONTENT,
    "an authority": b"CONNECT example.com:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "an asterisk": b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    "no slash": POST.replace(b"/v1", b"v1") + HOST + TYPE + LENGTH + b"\r\n" + CONTENT,
    "HTTP/0.9": b"GET /v1/models\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/3.1": POST.replace(b"1.1", b"3.1") + HOST + TYPE + LENGTH + b"\r\n" + CONTENT,
    "nonsense": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
}
WAITED_FOR = {("a huge chunk", "408"), ("a longer chunk", "408"), ("HTTP/0.9", "408")}
"""Messages that may be the beginning of longer ones."""


@pytest.fixture
def behind(gateway: Any, upstream: Any, brief: None) -> Any:
    """A gateway in front of an upstream that answers everything, and the upstream's requests."""
    server = upstream(lambda request: request.answer(b"{}"))
    settings = upstream_settings(server, request_timeout=1.0)
    return gateway({}, settings), server.requests


def test_c9_nothing_that_could_be_read_in_two_ways_reaches_the_upstream(behind: Any) -> None:
    running, requests = behind
    for name, message in SMUGGLED.items():
        with socket.create_connection(address(running.url), timeout=60) as connection:
            connection.sendall(message)
            status = connection.recv(12)[9:].decode()
            assert status in ("400", "404", "405", "421", "501", "505") or (name, status) in WAITED_FOR, (name, status)
        assert requests == [], name


def test_c9_a_proper_request_passes(behind: Any) -> None:
    """So that the refusals above are for what they seem to be."""
    running, requests = behind
    for message in (P + LENGTH + b"\r\n" + CONTENT, P + CHUNKED + b"\r\n" + CHUNK):
        with socket.create_connection(address(running.url), timeout=60) as connection:
            connection.sendall(message)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert [request.json for request in requests] == [BODY, BODY]


def test_c9_a_long_head_gets_431(behind: Any) -> None:
    running, requests = behind
    for count, size in ((1, 300_000), (200, 1), (20, 3000), (1, 40_000)):
        lines = b"".join(b"x-%d: %s\r\n" % (number, b"y" * size) for number in range(count))
        for end in (b"", b"\r\n"):
            with socket.create_connection(address(running.url), timeout=60) as connection:
                with suppress(OSError):
                    connection.sendall(P + b"content-length: 0\r\n" + lines + end)
                    connection.shutdown(socket.SHUT_WR)
                answer = rest(connection)
            assert answer[9:12] in (b"431", b"400", b""), (count, size)  # nothing: a reset while it is being sent
    assert requests == []


@pytest.mark.parametrize("after", [b"GARBAGE\r\n\r\n", (b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n") * 900])
def test_c9_what_follows_a_request_is_neither_queued_nor_part_of_its_answer(behind: Any, after: bytes) -> None:
    running, requests = behind
    with socket.create_connection(address(running.url), timeout=60) as connection:
        connection.sendall(P + LENGTH + b"\r\n" + CONTENT + after)
        answer = rest(connection)
    assert re.findall(rb"HTTP/1.1 (\d\d\d) ", answer) in ([b"200", b"400"], [b"200"]) and len(requests) == 1


TRAILERS = {
    "authorization": b"Bearer somebody",
    "x-agentspec-session": b"another",
    "host": b"example.com",
    "x-forwarded-for": b"10.0.0.1",
}


def test_c9_fields_behind_a_body_are_no_headers(behind: Any) -> None:
    """Nobody in front of the gateway has looked at them, and they may come with the head in one piece."""
    running, requests = behind
    trailers = b"".join(b"%s: %s\r\n" % (name.encode(), value) for name, value in TRAILERS.items())
    with socket.create_connection(address(running.url), timeout=60) as connection:
        for _ in range(2):  # nor are they the next request's
            connection.sendall(P + CHUNKED + b"\r\n" + CHUNK[:-2] + trailers + b"\r\n")
            assert answered(connection) == 200
    for request in requests:
        assert request.json == BODY and not any(value.decode() in str(request.headers) for value in TRAILERS.values())
        assert not TRAILERS.keys() - {"host"} & request.headers.keys()


def test_c9_an_offered_upgrade_does_not_make_the_body_a_request(behind: Any) -> None:
    """Java's clients offer HTTP/2 with their first request: they have to be told to send HTTP/1.1 alone."""
    running, requests = behind
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    for cut in (0, len(CONTENT)):
        with socket.create_connection(address(running.url), timeout=60) as connection:
            connection.sendall(P + offer + LENGTH + b"\r\n" + CONTENT[:cut])
            answer = rest(connection)
            assert answer.startswith(b"HTTP/1.1 400 ") and b"Upgrade" in answer
    assert not requests
