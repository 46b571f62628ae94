"""vLLM servers as processes in a separate environment, which `.ci/vllm-env` creates, and a client of one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from agentspec.benchmarks.vllm.engine import FIXED

SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 32, "suffix_decoding_max_tree_depth": 64}
STOP_SECONDS = 30.0
START_SECONDS = 420.0  # the first start on a machine compiles for minutes


class VllmServer:
    """A server of the vLLM in `environment`, on a CPU. `start` waits until it answers.

    Of this process's environment variables the server gets those that do not start with `AGENTSPEC_`.
    """

    def __init__(
        self,
        environment: Path,
        model: Path,
        log: Path,
        speculative: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AGENTSPEC_")}
        self.variables = {**clean, **FIXED, **(variables or {})}
        self.command = [
            str(environment / "bin" / "vllm"), "serve", str(model), "--served-model-name", "model",
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
            "--max-model-len", "2048", "--max-num-seqs", "16", *options,
        ]  # fmt: skip
        if speculative:
            self.command += ["--speculative-config", json.dumps(speculative)]

    def start(self) -> Self:
        """Raises `RuntimeError` with the end of its log if it does not answer."""
        with self.log.open("ab") as log:  # a session of its own, so that one signal reaches it and its children
            self._process = subprocess.Popen(
                self.command, env=self.variables, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return self
            time.sleep(0.5)
        self.kill()
        raise RuntimeError(f"the server did not start:\n{self.text()[-3000:]}")

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """Stop the server as an operator would: send SIGTERM, and kill what still runs after a while."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill all processes of the server."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def metric(self, name: str) -> float:
        """A counter of the server's /metrics, summed over labels; 0 if there is none."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


class ClientAnswer(NamedTuple):
    """One answer as the client received it."""

    text: str
    tokens: int
    steps: int


def ask(server: VllmServer, prompt: str, **more: Any) -> ClientAnswer:
    """Stream one greedy chat answer. Raises `urllib.error.URLError` if the server does not answer."""
    body = {"model": "model", "messages": [{"role": "user", "content": prompt}], "temperature": 0.0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **more}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    pieces: list[str] = []
    steps = tokens = 0
    with urllib.request.urlopen(request, timeout=600) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage")
            tokens = usage["completion_tokens"] if usage else tokens
            for choice in chunk["choices"]:
                steps += "role" not in choice["delta"] or bool(choice["delta"].get("content"))
                pieces.append(choice["delta"].get("content") or "")
    return ClientAnswer("".join(pieces), tokens, max(1, steps))
