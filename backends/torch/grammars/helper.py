"""Tries large grammars out in another process, which may die of them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
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
MOST_SECONDS: Final = 60.0  # of a trial, on a machine however busy
START_SECONDS: Final = 120.0
_DEATHS: Final[dict[int, str]] = {
    signal.SIGSEGV: "compiling it needs too much stack: nest less, and let fewer rules lead to one another",
    signal.SIGBUS: "compiling it needs too much stack: nest less, and let fewer rules lead to one another",
    signal.SIGABRT: "compiling it needs too much memory: make it smaller",
    signal.SIGXCPU: f"compiling it takes more than {worker.CPU_SECONDS} seconds: make it smaller",
}


class CompileHelper:
    """The other process, started when it is first needed and again after it died. Thread-safe; tries out one grammar at
    a time.
    """

    def __init__(self, setup: Callable[[], dict[str, Any]]) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def try_out(self, source: str) -> int:
        """How many bytes the compiled grammar takes. Blocks until the process has compiled it.

        Raises `ValueError` with the reason why it cannot be compiled within the limits, `OverloadedError` if that is
        not known now, `ShuttingDownError` after `close`, and `EngineError` if no process can be started.
        """
        with self._lock:
            self._require_open()
            process = self._process
            if process is None or process.poll() is not None:  # it also ends by itself when it is not needed for long
                process = self._start()
            said = _exchange(process, source, MOST_SECONDS)
        self._require_open()
        if said is None:
            raise _death(-process.wait(), len(source))
        if "error" in said:
            raise ValueError(said["error"])
        if said["nbytes"] > MAX_GRAMMAR_BYTES:
            raise ValueError(f"it takes more than {MAX_GRAMMAR_BYTES >> 20} MiB: make it smaller")
        return int(said["nbytes"])

    def close(self) -> None:
        """End the process, and whatever it is compiling."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
            process.wait()

    def _require_open(self) -> None:
        if self._closed:
            raise ShuttingDownError("the engine is shutting down")

    def _start(self) -> subprocess.Popen[bytes]:
        setup = self._setup()  # it raises for some tokenizers
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", str(Path(worker.__file__).resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for the process that asks
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
            )
        except OSError as error:
            raise EngineError(f"large grammars cannot be compiled: no process can be started: {error}") from error
        weakref.finalize(self, _end, process)
        self._process = process
        if self._closed:
            process.kill()
        if _exchange(process, setup, START_SECONDS) is None:
            self._require_open()
            raise EngineError("large grammars cannot be compiled: the process that tries them out does not start")
        return process


def _exchange(process: subprocess.Popen[bytes], asked: Any, seconds: float) -> dict[str, Any] | None:
    """The process's answer; None if it has ended, which it does at the latest after `seconds`."""
    assert process.stdin is not None and process.stdout is not None
    late = threading.Timer(seconds, process.kill)
    late.start()
    try:
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except OSError:
        line = b""
    finally:
        late.cancel()
    if line.endswith(b"\n"):
        answer: dict[str, Any] = json.loads(line)
        return answer
    _end(process)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _death(number: int, length: int) -> Exception:
    """What the death of the process by a signal says of a grammar."""
    logger.warning("a grammar of %d characters ended its compiler by signal %d", length, number)
    if number in (signal.SIGKILL, signal.SIGALRM):  # the machine is too busy, or short of memory
        return OverloadedError("this machine has no time or memory to compile a large grammar now")
    return ValueError(_DEATHS.get(number, _DEATHS[signal.SIGABRT]))
