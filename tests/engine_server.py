"""Inference servers as processes of another environment."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

HANG = 3000.0  # seconds after which no busy machine is to blame


class EngineServer:
    """A server that `command` starts with a host and a port. Its output goes to `log`.

    Of this process's environment variables it gets those that do not start with `AGENTSPEC_`.
    """

    def __init__(self, command: Sequence[str | Path], log: Path, variables: Mapping[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self.command = [*map(str, command), "--host", "127.0.0.1", "--port", str(port)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AGENTSPEC_")}
        self.variables = {**clean, **variables}

    def start(self) -> Self:
        """Wait until it answers. Raises `RuntimeError` with the end of its log if it ends before that."""
        with self.log.open("ab") as log:  # a session of its own, so that one signal reaches it and its children
            self._process = subprocess.Popen(
                self.command, env=self.variables, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + HANG
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=60):
                return self
            time.sleep(0.5)
        self.kill()
        raise RuntimeError(f"the server did not start:\n{self.text()[-3000:]}")

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """Stop the server as an operator would, by SIGTERM."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(HANG)
        self.kill()

    def kill(self) -> None:
        """Kill all processes of the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def metrics(self) -> str:
        """What the server's /metrics says."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=HANG) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """A counter of these, summed over labels; 0 if there is none."""
        lines = self.metrics().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
