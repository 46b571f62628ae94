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
from agentspec.errors import EngineError, OverloadedError, ShuttingDownError

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
        self._turn = threading.Lock()  # of who asks the process, or ends it
        self._state = threading.Lock()  # of `_process` and `_closings`; held for moments only
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], Any] | None = None
        self._closings = 0

    def try_out(self, source: str) -> int:
        """How many bytes the compiled grammar takes. Blocks until the process has compiled it.

        Raises `ValueError` with the reason why it cannot be compiled within the limits, `OverloadedError` if that
        cannot be told now, `ShuttingDownError` if `close` is called meanwhile, and `EngineError` if no process can be
        started.
        """
        closings = self._closings
        with self._turn:
            said = self._ask(source, closings)
            said = said or self._ask(source, closings)  # it may have just ended because nobody asked for long
            self._require_open(closings)
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
        """End the process, and whatever it is compiling. It starts again when it is needed again."""
        with self._state:
            self._closings += 1
            if self._process is not None:
                _kill(self._process)  # whoever waits for its answer sees it end, and clears up
        with self._turn:
            self._stop()

    def _ask(self, source: str, closings: int) -> dict[str, Any] | None:
        """The process's answer; None if it has ended."""
        self._require_open(closings)
        process = self._process or self._start(closings)
        said = self._exchange(process, {"source": source}, worker.WALL_SECONDS + 30.0)
        if said is None:
            self._stop()
        return said

    def _require_open(self, closings: int) -> None:
        if closings != self._closings:
            raise ShuttingDownError("the engine is shutting down")

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
        with contextlib.suppress(OSError, ValueError):
            return worker.read_frame(process.stdout.fileno()) if answered else None
        return None

    def _start(self, closings: int) -> subprocess.Popen[bytes]:
        setup = self._setup()  # it raises for some tokenizers
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
        with self._state:
            self._process, self._end = process, weakref.finalize(self, _end, process)
        if closings != self._closings or self._exchange(process, setup, START_SECONDS) is None:
            self._stop()
            self._require_open(closings)
            raise EngineError("large grammars cannot be compiled: the process that tries them out does not start")
        return process

    def _stop(self) -> None:
        with self._state:
            end, self._process, self._end = self._end, None, None
        if end is not None:
            end()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and the fork that compiles for it, which is in the same session."""
    with contextlib.suppress(OSError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    _kill(process)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
