"""vLLM servers as programs of their own, in an environment of their own (`.ci/vllm-env` makes one)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ENVIRONMENT = "AGENTSPEC_VLLM_ENV"
START_SECONDS = 420.0  # the first start on a machine compiles for minutes
STOP_SECONDS = 30.0

SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 32, "suffix_decoding_max_tree_depth": 64}


def find_environment(root: Path | None = None) -> Path | None:
    """The environment that has vLLM: `AGENTSPEC_VLLM_ENV`, or `.venv-vllm` in this folder; None where there is none."""
    named = os.environ.get(ENVIRONMENT)
    folder = Path(named) if named else (root or Path.cwd()) / ".venv-vllm"
    return folder if (folder / "bin" / "vllm").exists() else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class VllmServer:
    """One server. `start` waits until it answers; as a context manager it is stopped at the end."""

    environment: Path
    model: Path
    log: Path
    speculative: Mapping[str, Any] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    max_length: int = 2048
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> Self:
        """Start it and do not wait."""
        command = [
            str(self.environment / "bin" / "vllm"), "serve", str(self.model), "--served-model-name", "model",
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
            "--max-model-len", str(self.max_length), "--max-num-seqs", "16", *self.options,
        ]  # fmt: skip
        if self.speculative:
            command += ["--speculative-config", json.dumps(self.speculative)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AGENTSPEC_")}
        # What 0.32 compiles ahead of time for CPUs cannot be loaded again: each start would take minutes.
        fixed = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_AOT_COMPILE": "0"}
        variables = {**clean, **fixed, **self.variables}
        # Its children end with it: a session of its own is one thing to signal.
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
        return self

    def wait(self, timeout: float = START_SECONDS) -> Self:
        """Until it answers. Raises `RuntimeError` with the end of its log where it does not."""
        until = time.monotonic() + timeout
        while time.monotonic() < until and self.running:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self.kill()
        raise RuntimeError(f"vLLM did not start:\n{self.text()[-3000:]}")

    def start(self) -> Self:
        return self.launch().wait()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """As an operator would: SIGTERM, and what is left after a while is killed."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """kill -9 of all its processes."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def metric(self, name: str) -> float:
        """A counter of its /metrics, summed over labels; 0 where there is none."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
