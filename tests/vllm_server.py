"""vLLM servers as processes in a separate environment, which `.ci/vllm-env` creates, and a client of one."""

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

from agentspec.benchmarks.vllm.engine import FIXED

SUFFIX: dict[str, Any] = {"method": "suffix", "num_speculative_tokens": 32, "suffix_decoding_max_tree_depth": 64}


STOP_SECONDS = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


class VllmServer(ServerProcess):
    """A server of the vLLM in `environment`, on a CPU."""

    def __init__(
        self,
        environment: Path,
        model: Path,
        log: Path,
        speculative: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        *,
        max_length: int = 2048,
        port: int | None = None,
    ) -> None:
        super().__init__(log=log, variables={**FIXED, **(variables or {})}, port=port or free_port())
        self.command = [
            str(environment / "bin" / "vllm"), "serve", str(model), "--served-model-name", "model",
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
            "--max-model-len", str(max_length), "--max-num-seqs", "16", *options,
        ]  # fmt: skip
        if speculative:
            self.command += ["--speculative-config", json.dumps(speculative)]

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


@dataclass(frozen=True, slots=True)
class ClientAnswer:
    """One answer as the client received it."""

    text: str
    tokens: int
    steps: int
    seconds: float


def ask(
    server: VllmServer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
    timeout: float = 600.0,
    **more: Any,
) -> ClientAnswer:
    """Stream one chat answer. Raises `urllib.error.URLError` if the server does not answer."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    pieces: list[str] = []
    steps = tokens = 0
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage")
            tokens = usage["completion_tokens"] if usage else tokens
            for choice in chunk["choices"]:
                steps += "role" not in choice["delta"] or bool(choice["delta"].get("content"))
                pieces.append(choice["delta"].get("content") or "")
    return ClientAnswer("".join(pieces), tokens, max(1, steps), time.perf_counter() - started)
