"""`serve` in a process of its own: start, drain, exit status."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from agentspec import cli
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError
from agentspec.proxy import create_app
from agentspec.proxy.serving import COLLECT_AFTER, serve, spare_what_is_loaded
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import FakeBackend


@pytest.mark.parametrize("sent", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_load_under_way_does_not_hold_up_the_end(tmp_path: Path, sent: signal.Signals) -> None:
    """The weights are a pipe that no one writes to, so that reading them never ends."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    command = [Path(sys.executable).with_name("agentspec"), "serve", "--model", tmp_path, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            next(line for line in process.stderr if '"event": "loading"' in line)
            process.send_signal(sent)
            log = process.stderr.read()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert json.loads(log.splitlines()[-1])["event"] != "loading failed" and "stopped while loading" in log


def test_a_terminal_gets_sentences_and_the_url_once_it_answers() -> None:
    ours, theirs = os.openpty()
    command = [
        Path(sys.executable).with_name("agentspec"),
        "serve",
        "--upstream",
        "http://127.0.0.1:9/v1",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stderr=theirs) as process:
        os.close(theirs)
        try:
            text = ""
            while (
                ready := re.search(r"ready after [\d.]+ s: (\S+) answers for any model; open \S+/ui\r\n", text)
            ) is None:
                text += os.read(ours, 4096).decode()
            assert httpx.get(f"{ready[1].removesuffix('/v1')}/ready").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(ours)
    assert text.startswith("loading any model") and "{" not in text and "running" not in text


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process that serves is not its own: it keeps its log and its collector."""
    monkeypatch.setattr("agentspec.proxy.logs.configure", lambda *_, **options: None)
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)


@pytest.mark.usefixtures("in_this_process")
def test_a_backend_that_cannot_be_built_ends_serve() -> None:
    up = OpenAISettings(base_url="http://127.0.0.1:9/v1", api_key_file="/nonexistent/key")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="/nonexistent/key"):
        serve(Settings(server=ServerSettings(port=0), backends={"up": up}))


@pytest.mark.usefixtures("in_this_process")
def test_an_address_that_is_taken_is_said_before_anything_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(cli.app, ["serve", "--upstream", "http://127.0.0.1:9/v1", "--port", port])
    assert done.exit_code == 2 and "loading" not in caplog.text and "Traceback" not in done.stderr
    assert f"cannot listen on server.host = '127.0.0.1', server.port = {port}: " in done.stderr


@pytest.mark.anyio
@pytest.mark.usefixtures("in_this_process")
async def test_the_collector_passes_over_what_was_loaded_before_the_gateway_is_ready() -> None:
    loading = create_app(Runtime(Settings(backends={}), backends={"fake": FakeBackend("x")})).loading
    loaded = asyncio.Event()
    loading.when_ready = lambda: (spare_what_is_loaded(), loaded.set())
    gc.unfreeze()
    async with loading.lifespan():
        await loaded.wait()
        assert gc.get_freeze_count() > 10 * len(gc.get_objects()) and gc.get_threshold() == COLLECT_AFTER
