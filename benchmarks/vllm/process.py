"""An inference server as a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

STOP_SECONDS = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stats() -> Iterator[str]:
    """What Linux tells of each process that runs."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            yield file.read_text()


@dataclass(kw_only=True)
class ServerProcess:
    """One server. `start` waits until it answers; leaving the `with` block stops it.

    Of this process's environment variables the server gets those that do not start with `AGENTSPEC_`.
    """

    log: Path
    command: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    start_seconds: float = 420.0  # the first start on a machine compiles for minutes
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> Self:
        """Start the server without waiting for it. Raises `RuntimeError` if there is no such program."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AGENTSPEC_")}
        variables = {**clean, **self.variables}
        # The server gets its own session, so that one signal reaches it and its children.
        with self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    [*self.command], env=variables, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                raise RuntimeError(f"the server's program cannot be started: {error}") from error
        return self

    def wait(self) -> Self:
        """Wait until the server answers. Raises `RuntimeError` with the end of its log if it does not."""
        until = time.monotonic() + self.start_seconds
        while time.monotonic() < until and self.running:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self.kill()
        raise RuntimeError(f"the server did not start:\n{self.text()[-3000:]}")

    def start(self) -> Self:
        return self.launch().wait()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def processor(self) -> float:
        """Seconds of processor time of all processes of the server that run, so far. Needs /proc."""
        if self._process is None:
            return 0.0
        stats = (text.rpartition(")")[2].split() for text in _stats())
        own = (fields for fields in stats if int(fields[3]) == self._process.pid)  # of its session
        return sum(int(fields[11]) + int(fields[12]) for fields in own) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Stop the server as an operator would: send SIGTERM, and kill what still runs after a while."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill all processes of the server with SIGKILL."""
        if self._process is None:
            return
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def signal(self, sent: signal.Signals) -> None:
        """Send a signal to all processes of the server."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sent)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
