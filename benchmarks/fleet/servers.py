"""Servers of a small model, each on a core of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agentspec.errors import AgentSpecError, ConfigurationError

START_SECONDS = 300.0


class ServerFailedError(AgentSpecError):
    """A server ended or did not start; the message quotes what it said."""


@contextmanager
def pinned_servers(count: int, model: str, folder: Path) -> Iterator[list[str]]:
    """The addresses of `count` servers of `model`, each bound to a core. Raises `ConfigurationError`."""
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigurationError("processes are bound to cores on Linux only: give --url of servers that run")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        raise ConfigurationError(f"{count} servers need a core each, and there are {len(cores)}")
    with ExitStack() as stack:
        started = [stack.enter_context(_server(core, model, folder)) for core in cores[:count]]
        for url, log, process in started:
            _wait_until_ready(url, log, process)
        yield [f"{url}/v1" for url, _, _ in started]


@contextmanager
def _server(core: int, model: str, folder: Path) -> Iterator[tuple[str, Path, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    log = folder / f"server-{core}.log"
    command = [sys.executable, "-c", _PINNED.format(core=core), "serve", "--model", model, "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=out, env=environment)
        try:
            yield f"http://127.0.0.1:{port}", log, process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


_PINNED = "import os; os.sched_setaffinity(0, {{{core}}}); from agentspec.cli import app; app()"


def _wait_until_ready(url: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_SECONDS
    while not _answers(f"{url}/ready"):
        if process.poll() is not None or time.monotonic() > limit:
            raise ServerFailedError(f"a server did not start: {log.read_text()[-2000:]}")
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
