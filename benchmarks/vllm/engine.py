"""One engine as a process of its own that answers lines of JSON, and is killed when it takes too long."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

LOG_END = 1000  # characters of the log that are told of an engine that failed,
MOST_ERRORS = 5  # and errors that it names: the first cause stands far above the end of vLLM's logs
ENVIRONMENT = "AGENTSPEC_VLLM_ENV"
# vLLM 0.32 cannot reload code that it compiled ahead of time for CPUs: each start would take minutes.
FIXED = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_AOT_COMPILE": "0"}
ERROR = re.compile(r"\b\w*(?:Error|Exception): .+")


def find_environment(root: Path | None = None) -> Path | None:
    """The environment with vLLM: `AGENTSPEC_VLLM_ENV`, or `.venv-vllm` in `root` or the current folder; else None."""
    named = os.environ.get(ENVIRONMENT)
    folder = Path(named) if named else (root or Path.cwd()) / ".venv-vllm"
    return folder if (folder / "bin" / "vllm").exists() else None


class EngineFailedError(RuntimeError):
    """An engine that did not start or answer, with the reason, the errors in its log and its end. It is killed."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """Answers to one command: seconds of all, tokens of each, prompt tokens that were cached, seconds after the first
    token of each, and the number of tokens of each step.
    """

    seconds: float
    tokens: list[list[int]]
    cached: list[int]
    decode: list[float]
    steps: list[int]

    def steps_after(self, prompt: int) -> int:
        """The steps after those that read a prompt of so many tokens, for an answer to one prompt."""
        left = prompt - self.cached[0]
        for number, tokens in enumerate(self.steps):
            if left <= 0:
                return len(self.steps) - number
            left -= tokens
        return 0


@dataclass(slots=True)
class EngineProcess:
    """An engine process. Of this process's variables it gets those that do not start with `AGENTSPEC_`."""

    name: str
    command: Sequence[str]
    log: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def launch(self) -> Self:
        """Start the process without waiting until it is ready. Raises `EngineFailedError` without such a program."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AGENTSPEC_")}
        pipe = subprocess.PIPE
        with self.log.open("wb") as log:
            try:
                # A session of its own lets one signal reach the process and its children.
                self._process = subprocess.Popen(
                    [*self.command], stdin=pipe, stdout=pipe, stderr=log,
                    env={**clean, **self.variables}, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise EngineFailedError(f"its program cannot be started: {error}") from error
        return self

    def wait(self, seconds: float) -> None:
        """Wait until the engine is ready, and keep what it tells of itself."""
        self.info = self._exchange(None, seconds, "it was not ready").get("info", {})

    def call(self, name: str, *arguments: Any, seconds: float) -> Any:
        """What a method of `BenchmarkExtension` returns."""
        asked = {"op": "call", "name": name, "arguments": arguments}
        return self._exchange(asked, seconds, f"{name} did not end")["value"]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], *, seconds: float, sessions: Sequence[str]
    ) -> EngineAnswer:
        """An answer to each prompt, of exactly so many tokens."""
        asked = {"op": "generate", "prompts": prompts, "max_tokens": max_tokens, "sessions": sessions}
        return EngineAnswer(**self._exchange(asked, seconds, "there was no answer"))

    def kill(self) -> None:
        """Kill all processes of the engine. Idempotent."""
        if self._process is None:
            return
        self._signal()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with suppress(OSError):  # what was not written yet
                    pipe.close()
        self._process = None

    def _exchange(self, asked: Mapping[str, Any] | None, seconds: float, late: str) -> dict[str, Any]:
        """Send a command, if any, and read one answer. Raises `EngineFailedError` after `seconds`, or if it fails."""
        with self._watched(seconds) as expired:
            answer = self._spoken(asked)
        if answer is not None and "failed" not in answer:
            return answer
        reason = f"{late} within {seconds:.0f} s" if expired.is_set() else "its process ended"
        reason = answer["failed"] if answer else reason
        self.kill()
        raise EngineFailedError(f"{reason}; {_told(self.log.read_text(errors='replace'))}")

    def _spoken(self, asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """The engine's answer; None if its process ended."""
        try:
            line = self._sent(asked)
        except OSError:
            return None
        try:
            return dict(json.loads(line)) if line else None
        except (TypeError, ValueError):
            return {"failed": f"its answer is no JSON object: {line[:200]!r}"}

    def _sent(self, asked: Mapping[str, Any] | None) -> bytes:
        """Write a command, if any, and read one line."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return b""
        if asked is not None:
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
        return process.stdout.readline()

    @contextmanager
    def _watched(self, seconds: float) -> Iterator[threading.Event]:
        """Kill the engine after `seconds`, so that neither a write nor a read of its pipes waits for ever."""
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._signal()

        timer = threading.Timer(max(0.0, seconds), expire)
        timer.daemon = True
        timer.start()
        try:
            yield expired
        finally:
            timer.cancel()

    def _signal(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _told(log: str) -> str:
    """The first errors that a log names, each once, and its end."""
    errors = list(dict.fromkeys(ERROR.findall(log)))[:MOST_ERRORS]
    end = ["the end of its log:", log[-LOG_END:].strip() or "(empty)"]
    return "\n".join(["errors in its log:", *errors, *end] if errors else end)


@contextmanager
def started(engines: Sequence[EngineProcess], seconds: float, failed: dict[str, str]) -> Iterator[list[EngineProcess]]:
    """The engines that are ready within `seconds`, all started at once. Adds the others to `failed`, by name."""
    until = time.monotonic() + seconds
    try:
        launched = [engine for engine in engines if _succeeds(engine, engine.launch, failed)]
        yield [e for e in launched if _succeeds(e, partial(_wait_until, e, until), failed)]
    finally:
        for engine in engines:
            engine.kill()


def _wait_until(engine: EngineProcess, until: float) -> None:
    engine.wait(max(1.0, until - time.monotonic()))


def _succeeds(engine: EngineProcess, act: Callable[[], object], failed: dict[str, str]) -> bool:
    try:
        act()
    except EngineFailedError as error:
        failed[engine.name] = str(error)
        return False
    return True
