"""Tries large grammars out in another process, which may die of them."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from agentspec.backends.torch.grammars import worker
from agentspec.errors import EngineError, OverloadedError

logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES: Final = 128 << 20
START_SECONDS: Final = 120.0
_DEATHS: Final = {
    signal.SIGSEGV: "compiling it needs too much stack: nest less, and let fewer rules lead to one another",
    signal.SIGBUS: "compiling it needs too much stack: nest less, and let fewer rules lead to one another",
    signal.SIGABRT: "compiling it needs too much memory: make it smaller",
    signal.SIGXCPU: f"compiling it takes more than {worker.CPU_SECONDS} seconds: make it smaller",
}


class CompileHelper:
    """The other process, started when it is first needed. Thread-safe; answers one grammar at a time."""

    def __init__(self, setup: Callable[[], dict[str, Any]]) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], Any] | None = None

    def try_out(self, source: str) -> int:
        """How many bytes the compiled grammar takes. Blocks until the process has compiled it.

        Raises `ValueError` with the reason why it cannot be compiled within the limits, `OverloadedError` if that
        cannot be told now, and `EngineError` if no process can be started.
        """
        with self._lock:
            said = self._ask(source) or self._ask(source)  # it may have just ended because nobody asked for long
            if said is None:
                raise EngineError("large grammars cannot be compiled: the process that tries them out ended twice")
        if "error" in said:
            raise ValueError(said["error"])
        if "died" in said:
            number = said["died"]
            logger.warning("a grammar of %d characters ended its compiler by signal %d", len(source), number)
            if number == signal.SIGKILL:  # the machine is too busy, or short of memory
                raise OverloadedError("this machine has no time or memory to compile a large grammar now")
            raise ValueError(_DEATHS.get(number, _DEATHS[signal.SIGABRT]))
        if said["nbytes"] > MAX_GRAMMAR_BYTES:
            raise ValueError(f"it takes more than {MAX_GRAMMAR_BYTES >> 20} MiB: make it smaller")
        return int(said["nbytes"])

    def close(self) -> None:
        """End the process. It starts again when it is needed again."""
        with self._lock:
            self._stop()

    def _ask(self, source: str) -> dict[str, Any] | None:
        """The process's answer; None if it has ended."""
        process = self._process or self._start()
        said = self._exchange(process, {"source": source}, worker.WALL_SECONDS + 30.0)
        if said is None:
            self._stop()
        return said

    def _exchange(
        self, process: subprocess.Popen[bytes], asked: dict[str, Any], seconds: float
    ) -> dict[str, Any] | None:
        """Send a frame and wait for the answer; None if the process has ended or takes too long."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(worker.frame(asked))
            process.stdin.flush()
        except OSError:
            return None
        with selectors.DefaultSelector() as selector:  # `select` would fail for a descriptor above 1023
            selector.register(process.stdout, selectors.EVENT_READ)
            answered = selector.select(seconds)
        return worker.read_frame(process.stdout.fileno()) if answered else None

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", str(Path(worker.__file__).resolve())]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for the process that asks
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
            )
        except OSError as error:
            raise EngineError(f"large grammars cannot be compiled: no process can be started: {error}") from error
        self._process, self._end = process, weakref.finalize(self, _end, process)
        if self._exchange(process, self._setup(), START_SECONDS) is None:
            self._stop()
            raise EngineError("large grammars cannot be compiled: the process that tries them out does not start")
        return process

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
