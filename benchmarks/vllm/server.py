"""Starts vLLM servers as processes in a separate environment, which `.ci/vllm-env` creates."""

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
    """The environment with vLLM: `AGENTSPEC_VLLM_ENV`, or `.venv-vllm` in `root` or the current folder; else None."""
    named = os.environ.get(ENVIRONMENT)
    folder = Path(named) if named else (root or Path.cwd()) / ".venv-vllm"
    return folder if (folder / "bin" / "vllm").exists() else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class VllmServer:
    """One server. `start` waits until the server answers; leaving the `with` block stops it."""

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
        """Start the server without waiting for it."""
        command = [
            str(self.environment / "bin" / "vllm"), "serve", str(self.model), "--served-model-name", "model",
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
            "--max-model-len", str(self.max_length), "--max-num-seqs", "16", *self.options,
        ]  # fmt: skip
        if self.speculative:
            command += ["--speculative-config", json.dumps(self.speculative)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AGENTSPEC_")}
        # vLLM 0.32 cannot reload code that it compiled ahead of time for CPUs: each start would take minutes.
        fixed = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_AOT_COMPILE": "0"}
        variables = {**clean, **fixed, **self.variables}
        # The server gets its own session, so that one signal reaches it and its children.
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
        return self

    def wait(self, timeout: float = START_SECONDS) -> Self:
        """Wait until the server answers. Raises `RuntimeError` with the end of its log if it does not."""
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def metric(self, name: str) -> float:
        """A counter of the server's /metrics, summed over labels; 0 if there is none."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def tokenize(self, text: str) -> list[int]:
        """The token ids of `text` without special tokens."""
        body = json.dumps({"model": "model", "prompt": text, "add_special_tokens": False}).encode()
        request = urllib.request.Request(f"{self.url}/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return list(json.loads(answer.read())["tokens"])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
