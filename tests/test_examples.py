"""Every example runs as its reader runs it: in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from agentspec.proxy import create_app
from agentspec.runtime import Runtime
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Speculation


def process(repository: Path, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::ResourceWarning", str(repository / "examples" / name), *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=500, check=False
    )


def run(repository: Path, name: str, *arguments: str, **environment: str) -> str:
    done = process(repository, name, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "leaked" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture
def gateway() -> Iterator[str]:
    """A gateway on a free port, with a backend that plays a script."""
    speculation = Speculation(drafted=5, accepted=4, steps=2, estimated_seconds_saved=0.125)
    backend = FakeBackend(Answer(text="hello from the gateway", speculation=speculation))
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(Runtime(backends={"fake": backend}))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for _ in range(1200):
        if server.started and httpx.get(f"{address}/health").status_code == 200:
            break
        time.sleep(0.05)
    yield f"{address}/v1"
    server.should_exit = True
    thread.join()
    listener.close()


def test_proxy_client(repository: Path, gateway: str) -> None:
    printed = run(repository, "proxy_client.py", OPENAI_BASE_URL=gateway)
    assert "hello from the gateway" in printed
    (row,) = [line for line in printed.splitlines() if "greet" in line]
    assert row.split()[:2] == ["example", "greet"]


@pytest.mark.slow
def test_proxy_client_says_in_a_line_what_is_wrong(repository: Path, gateway: str) -> None:
    nowhere = process(repository, "proxy_client.py", OPENAI_BASE_URL="http://127.0.0.1:9/v1")
    assert nowhere.returncode == 1 and "start one with `agentspec serve`" in nowhere.stderr
    unknown = process(repository, "proxy_client.py", "nosuch", OPENAI_BASE_URL=gateway)
    assert unknown.returncode == 1 and "no model 'nosuch' here; configured: 'fake'" in unknown.stderr
    assert nowhere.stderr.count("\n") == unknown.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart.py", "decorator.py", "langgraph_agent.py", "proxy_client.py"])
def test_help_runs_nothing(repository: Path, name: str) -> None:
    assert run(repository, name, "--help").startswith(f"usage: {name}")


@pytest.mark.slow
@pytest.mark.model
def test_quickstart(repository: Path) -> None:
    printed = run(repository, "quickstart.py")
    assert "after 9 2 3 4 comes, by experience: [5" in printed
    first, second = (int(line.split()[-3]) for line in printed.splitlines() if "verify steps" in line)
    assert second < first


@pytest.mark.long
@pytest.mark.model
def test_decorator(repository: Path) -> None:
    printed = run(repository, "decorator.py")
    assert "polish" in printed and "letters" in printed


@pytest.mark.long
@pytest.mark.model
def test_langgraph_agent(repository: Path) -> None:
    printed = run(repository, "langgraph_agent.py")
    assert "capitals" in printed and "check" in printed and printed.count("ai:") == 2


@pytest.mark.long
@pytest.mark.model
def test_rag_agent(repository: Path) -> None:
    printed = run(repository, "rag_agent.py")
    assert "draft: " in printed and "check: " in printed
    assert "2 look-ups, 1 guessed, 1 of these right" in printed
    own = run(repository, "rag_agent.py", str(repository / "examples" / "passages.jsonl"), "Who", "was", "Hutton?")
    assert "2 look-ups" in own


def test_every_example_is_tested(repository: Path) -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in (repository / "examples").glob("*.py")} <= tested
