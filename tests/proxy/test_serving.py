"""`serve` in a process of its own: start, drain, exit status."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from agentspec import cli
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError
from agentspec.proxy import logs
from agentspec.proxy.hosts import is_unprotected
from agentspec.proxy.loading import Loading
from agentspec.proxy.serving import COLLECT_AFTER, PIECE, in_pieces, serve, spare_what_is_loaded
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ApiKey, ServerSettings
from agentspec.testing import FakeBackend

PROGRAM = """
import asyncio, os, sys
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.proxy import create_app, logs
from agentspec.proxy.serving import GatewayServer
from agentspec.runtime import Runtime
from agentspec.testing import FakeBackend

class Held(FakeBackend):
    async def generate(self, request):
        async for delta in super().generate(request):
            yield delta
            while not os.path.exists(sys.argv[2]):  # the rest comes once this file is there
                await asyncio.sleep(0.01)

logs.configure("INFO", sys.stdout)
settings = Settings(server=ServerSettings(port=0, drain_timeout=float(sys.argv[1])), backends={})
runtime = Runtime(settings, backends={"fake": Held("one two three four five")})
GatewayServer(create_app(runtime, settings), settings).run()
print("flushed", runtime.ready, flush=True)
"""
BODY = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": True}


class Process:
    def __init__(self, drain_timeout: float, released: Path) -> None:
        self.released = released
        command = [sys.executable, "-c", PROGRAM, str(drain_timeout), released]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout
        for line in self.popen.stdout:
            if "running on" in line:
                self.url = json.loads(line)["event"].split()[3]
            if json.loads(line)["event"] == "ready":
                return

    def stream(self, into: list[str]) -> threading.Thread:
        """Begin a streamed request; returns once its first event is there."""
        begun = threading.Event()

        def read() -> None:
            try:
                with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=BODY, timeout=500) as response:
                    for line in response.iter_lines():
                        into.append(line)
                        begun.set()
            except httpx.HTTPError as error:
                into.append(type(error).__name__)

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(60)
        return thread

    def end(self) -> tuple[int, str]:
        output, _ = self.popen.communicate(timeout=500)
        return self.popen.returncode, output


@pytest.fixture
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    started = Process(request.param, tmp_path / "released")
    yield started
    if started.popen.poll() is None:
        started.popen.kill()
        started.popen.wait()
    if started.popen.stdout:
        started.popen.stdout.close()


@pytest.mark.parametrize("process", [120.0], indirect=True)
def test_sigterm_lets_running_requests_finish(process: Any) -> None:
    lines: list[str] = []
    thread = process.stream(lines)
    process.popen.send_signal(signal.SIGTERM)
    with pytest.raises(httpx.HTTPError):  # it takes no more connections: a balancer asks another gateway
        while True:
            httpx.get(f"{process.url}/health")
    process.released.touch()
    thread.join(60)
    status, output = process.end()
    assert "data: [DONE]" in lines and len([line for line in lines if line]) == 7
    assert status == 0 and output.endswith("flushed False\n")


@pytest.mark.slow
@pytest.mark.parametrize("process", [0.3], indirect=True)
def test_the_drain_has_an_end(process: Any) -> None:
    lines: list[str] = []
    thread = process.stream(lines)
    process.popen.send_signal(signal.SIGTERM)
    status, output = process.end()
    thread.join(60)
    assert status == 0 and output.endswith("flushed False\n")
    *_, last, done = [json.loads(line) if "{" in line else line for line in (one[6:] for one in lines) if line]
    assert last["error"]["code"] == "shutting_down" and done == "[DONE]"  # cut short, and the client is told


@pytest.mark.slow
@pytest.mark.parametrize("process", [3600.0], indirect=True)  # what it would drain for, were it not idle
def test_an_idle_server_stops_at_once(process: Any) -> None:
    process.popen.send_signal(signal.SIGINT)
    assert process.end()[0] == 0


@pytest.mark.parametrize("sent", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_load_under_way_does_not_hold_up_the_end(tmp_path: Path, sent: signal.Signals) -> None:
    """The weights are a pipe that nobody writes to, so that reading them never ends."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    command = [Path(sys.executable).with_name("agentspec"), "serve", "--model", tmp_path, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            next(line for line in process.stderr if "running on" in line)
            process.send_signal(sent)
            log = process.stderr.read()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert json.loads(log.splitlines()[-1])["event"] != "loading failed" and "stopped while loading" in log


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process that serves is not its own: it keeps its log and its collector."""
    monkeypatch.setattr(logs, "configure", lambda *_, **options: None)
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)


@pytest.mark.usefixtures("in_this_process")
def test_a_backend_that_cannot_be_built_ends_serve() -> None:
    up = OpenAISettings(base_url="http://127.0.0.1:9/v1", api_key_file="/nonexistent/key")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="/nonexistent/key"):
        serve(Settings(server=ServerSettings(port=0), backends={"up": up}))


@pytest.mark.usefixtures("in_this_process")
def test_an_address_that_is_taken_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(cli.app, ["serve", "--upstream", "http://127.0.0.1:9/v1", "--port", port])
    assert done.exit_code == 3 and f"'127.0.0.1', {port}): address already in use" in caplog.text
    assert "Traceback" not in done.stderr and "loading failed" not in caplog.text


@pytest.mark.parametrize(
    ("host", "open_to_all"),
    [("127.0.0.1", False), ("127.9.9.9", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True)],
)
def test_only_another_address_without_keys_is_unprotected(host: str, open_to_all: bool) -> None:
    assert is_unprotected(ServerSettings(host=host)) is open_to_all
    assert not is_unprotected(ServerSettings(host=host, api_keys=(ApiKey(key_env="KEY"),)))


@pytest.mark.anyio
@pytest.mark.usefixtures("in_this_process")
async def test_the_collector_passes_over_what_was_loaded_before_the_gateway_is_ready() -> None:
    loading = Loading(Runtime(Settings(backends={}), backends={"fake": FakeBackend("x")}))
    loaded = asyncio.Event()
    loading.when_ready = lambda: (spare_what_is_loaded(), loaded.set())
    gc.unfreeze()
    async with loading.lifespan():
        await loaded.wait()
        assert gc.get_freeze_count() > 10 * len(gc.get_objects()) and gc.get_threshold() == COLLECT_AFTER


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("more", [False, True])
def test_answers_are_sent_in_pieces(size: int, more: bool) -> None:
    sent: list[Any] = []
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": content, "more_body": more})

    async def keep(message: Any) -> None:
        sent.append(message)

    asyncio.run(in_pieces(app)({}, keep, keep))  # type: ignore[arg-type]
    start, *bodies = sent
    assert start["status"] == 200 and b"".join(one["body"] for one in bodies) == content
    assert all(len(one["body"]) <= PIECE for one in bodies)
    assert [one.get("more_body", False) for one in bodies] == [True] * (len(bodies) - 1) + [more]
