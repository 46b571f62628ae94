"""Real servers on loopback: gateways under uvicorn in a thread, and an upstream that misbehaves on request."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import uvicorn.server

from agentspec.backends.base import Backend
from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import OpenAISettings
from agentspec.proxy import logs
from agentspec.proxy.app import create_app
from agentspec.proxy.serving import GatewayServer
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ApiKey, ServerSettings

COMPLETIONS = "/v1/chat/completions"


async def _short_sleep(seconds: float) -> None:
    await asyncio.sleep(seconds / 10)


# Ten times as often as uvicorn does, a gateway of a test looks whether it is to end: most live shorter than it waits.
uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": _short_sleep})  # type: ignore[assignment]


@dataclass
class Running:
    """A gateway that answers at `url`."""

    url: str
    app: Any
    server: GatewayServer
    runtime: Runtime

    def metric(self, name: str, **labels: str) -> float:
        """A sample once every request is counted, which happens after its last byte was sent."""
        wait_for(lambda: not self.app.metrics.registry.get_sample_value("agentspec_requests_in_flight"))
        return self.app.metrics.registry.get_sample_value(name, labels) or 0.0


@contextmanager
def run_gateway(backends: Mapping[str, Backend], settings: Settings | None = None, **server: Any) -> Iterator[Running]:
    settings = settings or Settings(server=ServerSettings(**server), backends={})
    runtime = Runtime(settings, backends=backends)
    app = create_app(runtime, settings)
    listening = socket.socket(proto=socket.IPPROTO_TCP)  # named, or asyncio would not set TCP_NODELAY on it
    listening.bind(("127.0.0.1", 0))
    uvicorn = GatewayServer(app, settings)
    thread = threading.Thread(target=uvicorn.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        wait_for(lambda: uvicorn.started and (runtime.ready or app.loading.error), 90)
        assert app.loading.error is None
        yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", app, uvicorn, runtime)
    finally:
        uvicorn.should_exit = True
        thread.join(60)
        listening.close()
        assert not thread.is_alive()


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.005)


def key_files(folder: Path, *tenants: str, operator: str | None = None) -> tuple[ApiKey, ...]:
    """The key `key-of-NAME` of each tenant, and of an operator who has that name."""
    keys = [ApiKey(tenant=name, key_file=folder / name) for name in tenants]
    keys += [ApiKey(tenant=operator, role="operator", key_file=folder / operator)] if operator else []
    for key in keys:
        (folder / key.tenant).write_text(f"key-of-{key.tenant}")
    return tuple(keys)


StartGateway = Callable[..., Running]


@pytest.fixture
def gateway() -> Iterator[StartGateway]:
    """Start a gateway that stops with the test: `gateway({"local": backend}, max_concurrent=2)`."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(run_gateway(*args, **kwargs))


@pytest.fixture(scope="module")
def shared_gateway() -> Iterator[StartGateway]:
    """The same for gateways that a whole module shares."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(run_gateway(*args, **kwargs))


Closable = TypeVar("Closable", bound=AbstractContextManager[Any])


@pytest.fixture
def closing() -> Iterator[Callable[[Closable], Closable]]:
    """`client = closing(openai.OpenAI(...))` ends with the test: these clients refer to themselves, so that one left
    open keeps its connection until a collection during some later test finds it, which then fails for it."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Wait until a condition holds, or fail."""
    return wait_for


@contextmanager
def post_and_hang_up(url: str, body: object) -> Iterator[None]:
    """Send a request and, instead of reading its answer, hang up at the end."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: "
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + b"%d\r\n\r\n" % len(content) + content)
        yield


@pytest.fixture(scope="session")
def hanging_up() -> Callable[[str, object], AbstractContextManager[None]]:
    """`with hanging_up(gateway.url, body): ...` asks for a completion and leaves at the end of the block."""
    return post_and_hang_up


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that the process logs at DEBUG, as `serve` would write it."""
    root, stream = logging.getLogger(), io.StringIO()
    before = (root.handlers[:], root.level)
    logs.configure("DEBUG", stream)
    yield stream
    root.handlers[:], root.level = before


@dataclass
class Received:
    """A request as it came in, and the connection to answer it on."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: socket.socket

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def head(self, status: int = 200, content_type: str = "text/event-stream", **headers: str) -> None:
        """Begin an answer whose end is the connection's."""
        lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}", "connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.send("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def answer(self, body: bytes, status: int = 200, content_type: str = "application/json", **headers: str) -> None:
        self.head(status, content_type, content_length=str(len(body)), **headers)
        self.send(body)

    def chunk(self, data: bytes) -> None:
        """A piece of a body that was announced with transfer_encoding="chunked"; an empty one ends it."""
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def client_left(self, seconds: float) -> bool:
        """Whether the client closes the connection within `seconds`."""
        self.connection.settimeout(seconds)
        try:
            return self.connection.recv(1) == b""
        except TimeoutError:
            return False
        except OSError:
            return True


@dataclass
class ScriptedUpstream:
    """Answers every request with `script(request)`, in a thread each. Keeps the requests."""

    script: Callable[[Received], None] = lambda request: request.answer(b"{}")
    requests: list[Received] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/v1"
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def backend(self, **settings: Any) -> OpenAIBackend:
        return OpenAIBackend(OpenAISettings(base_url=self.url, **settings))  # type: ignore[arg-type]

    def close(self) -> None:
        with suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        for thread in self.threads:
            thread.join(10)

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            thread = threading.Thread(target=self.serve, args=(connection,))
            self.threads.append(thread)
            thread.start()

    def serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(10)
            request = _receive(connection)
            if request is not None:
                self.requests.append(request)
                self.script(request)


def _receive(connection: socket.socket) -> Received | None:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        body += connection.recv(65536)
    method, target, _ = first.split(" ")
    return Received(method, target, headers, body, connection)


StartUpstream = Callable[[Callable[[Received], None]], ScriptedUpstream]


def _upstreams() -> Iterator[StartUpstream]:
    with ExitStack() as stack:

        def start(script: Callable[[Received], None]) -> ScriptedUpstream:
            server = ScriptedUpstream(script)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture
def upstream() -> Iterator[StartUpstream]:
    """Start an upstream that does as its script says: `upstream(lambda request: request.answer(b"..."))`."""
    yield from _upstreams()


@pytest.fixture(scope="module")
def shared_upstream() -> Iterator[StartUpstream]:
    """The same for upstreams that a whole module shares."""
    yield from _upstreams()
