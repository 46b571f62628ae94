"""Gateways of several processes, each a program of its own, as `agentspec serve` starts them."""

from __future__ import annotations

import json
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

Line = dict[str, Any]
TRUST = ssl.create_default_context()  # to make one takes long


def _is_event(line: str) -> bool:
    """Whether a line is whole, and no sentence that a process said at its end."""
    return line.startswith("{") and line.endswith("\n")


class WorkersGateway:
    """`agentspec serve` with a configuration file in `folder`, and what it writes to its log."""

    def __init__(self, folder: Path, configuration: str, *arguments: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.log = folder / "agentspec.toml", folder / "log"
        self.file.write_text(configuration)
        command = [str(Path(sys.executable).with_name("agentspec")), "serve", "--config", str(self.file)]
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen(
                [*command, "--port", "0", "--log-level", "debug", *arguments], stderr=stderr, cwd=folder
            )

    @property
    def lines(self) -> list[Line]:
        """The whole lines of the log: each is one JSON object, whichever process wrote it."""
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if _is_event(line)]

    def said(self, event: str, times: int = 1, **fields: Any) -> list[Line]:
        """The log's lines of this event, once there are so many."""
        limit = time.monotonic() + 300
        while True:
            found = [line for line in self.lines if event in line["event"] and fields.items() <= line.items()]
            if len(found) >= times:
                return found
            assert time.monotonic() < limit and self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    @property
    def url(self) -> str:
        [found] = re.findall(r"running on (\S+)", self.said("running on")[0]["event"])
        return str(found)

    def ready(self) -> WorkersGateway:
        self.said("ready", workers=2)
        return self

    def pid(self, worker: int | str) -> int:
        """The newest process of this name."""
        return int(self.said("process started", worker=worker)[-1]["pid"])

    def client(self, key: str = "", **options: Any) -> httpx.Client:
        """A client with a connection of its own."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=300, **{"verify": TRUST, **options})

    @contextmanager
    def clients(self, count: int, key: str = "", **options: Any) -> Iterator[list[httpx.Client]]:
        """Clients with connections on both workers in turn: a new one goes where there are fewest."""
        with ExitStack() as stack:
            clients = [stack.enter_context(self.client(key, **options)) for _ in range(count)]
            for client in clients:
                client.get("/health")
            yield clients

    def end(self, sent: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(sent)
        return self.process.wait(300)


Start = Callable[..., WorkersGateway]


@contextmanager
def _starting(factory: pytest.TempPathFactory) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(configuration: str, *arguments: str) -> WorkersGateway:
            gateway = WorkersGateway(factory.mktemp("gateway"), configuration, *arguments)
            stack.callback(gateway.process.wait)
            stack.callback(gateway.process.kill)
            return gateway

        yield start


@pytest.fixture
def start_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a gateway that ends with the test: `start_workers("[server]\\nworkers = 2\\n...")`."""
    with _starting(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="module")
def shared_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """The same for a gateway that a whole module shares."""
    with _starting(tmp_path_factory) as start:
        yield start
