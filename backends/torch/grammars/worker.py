"""Compiles grammars, and the program that tries out large ones in a process that may die.

The program reads the tokenizer, then grammars, and answers each: it forks, and the fork compiles the grammar and walks
some tokens of an answer under limits of processor time, memory and stack. It imports nothing of agentspec, so that it
starts fast: run it by its path. Frames are JSON after a length of four bytes, big-endian.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import llguidance

T = TypeVar("T")

STACK: Final = 64 << 20  # bytes of stack where a grammar is compiled that a fork has compiled on half of it
CPU_SECONDS: Final = 4
WALL_SECONDS: Final = 60.0
MEMORY: Final = 512 << 20
IDLE_SECONDS: Final = 600.0
TRIED_TOKENS: Final = 48
STEP_SECONDS: Final = 0.025  # processor time of a step on average, beyond which a grammar would slow other answers
FEW_STATES: Final = 4_000  # of a lexer, which finds them as answers go on and keeps them: usual forms need hundreds
MOST_STATES: Final = 25_000
STATE_BYTES: Final = 1_200  # 28 MB were measured of 25,000 states, 4 MB of 4,000
_stacks = threading.Lock()


def limits(states: int) -> llguidance.LLParserLimits:
    """The limits of a grammar whose lexer, which answers share, may have so many states."""
    return llguidance.LLParserLimits(
        max_items_in_row=8_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=states,
        max_grammar_size=500_000,
        precompute_large_lexemes=True,
        verbose_errors=False,  # they would show the parser's state to clients
    )


def built_tokenizer(text: str, vocab_size: int, end_ids: list[int]) -> llguidance.LLTokenizer:
    """The tables of a tokenizer, given as the JSON text of a fast tokenizer; about a second for a large vocabulary."""
    return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=end_ids)


def compiled(tokenizer: llguidance.LLTokenizer, source: str, states: int = MOST_STATES) -> llguidance.LLMatcher:
    """The grammar at the start of an answer. Raises `ValueError` with llguidance's message."""
    try:
        matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits(states))
    except Exception as error:
        raise ValueError(str(error)) from None
    except BaseException as error:  # pyo3 raises a panic of Rust beside `Exception`
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError("panic") from None
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def on_stack(size: int, function: Callable[[], T]) -> T:
    """Call `function` in a thread with `size` bytes of stack; return or raise as it does."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    with _stacks:
        usual = threading.stack_size(size)
        try:
            thread = threading.Thread(target=run, name="grammar")
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def walk(matcher: llguidance.LLMatcher) -> None:
    """Follow one possible answer for a while. Raises `ValueError` if a mask takes too much, or allows nothing."""
    state, started, step = matcher.deep_copy(), time.thread_time(), 0
    for step in range(TRIED_TOKENS):
        if state.is_stopped():
            break
        token = _allowed(state.compute_bitmask(), step)
        if state.is_error():
            raise ValueError(state.get_error())
        if token is None:
            raise ValueError("no token can go on with it")
        state.compute_ff_tokens()
        if not state.consume_token(token) or state.is_error():
            break
    if state.is_error():
        raise ValueError(state.get_error())
    if (seconds := (time.thread_time() - started) / (step + 1)) > STEP_SECONDS:
        raise ValueError(f"each of its tokens takes {seconds * 1000:.0f} ms: shorten its texts and repetitions")


def _allowed(bits: bytes, step: int) -> int | None:
    """One of the tokens in a mask, another at every step."""
    size = len(bits)
    for place in range(size):
        at = (place + step * 7919) % size
        if bits[at]:
            return at * 8 + bits[at].bit_length() - 1
    return None


def read_frame(descriptor: int) -> dict[str, Any] | None:
    """The next frame of a pipe, without reading ahead; None at its end."""
    head = _read(descriptor, 4)
    body = _read(descriptor, struct.unpack(">I", head)[0]) if len(head) == 4 else b""
    return json.loads(body) if body else None


def _read(descriptor: int, size: int) -> bytes:
    parts, left = [], size
    while left and (part := os.read(descriptor, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"" if left else b"".join(parts)


def frame(value: dict[str, Any]) -> bytes:
    """A value as bytes that `read_frame` reads."""
    body = json.dumps(value).encode()
    return struct.pack(">I", len(body)) + body


def _resident() -> int:
    """Bytes in memory; 0 where the system does not tell."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _limit() -> None:
    """Limit this process: processor time, memory beyond what it has now, and no core file."""
    import resource

    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + STACK + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _verdict(tokenizer: llguidance.LLTokenizer, source: str) -> dict[str, Any]:
    before = _resident()
    try:
        matcher = compiled(tokenizer, source)
        taken = max(0, _resident() - before)
        walk(matcher)
    except ValueError as error:
        return {"error": str(error)[:2000]}
    return {"nbytes": taken}


def _forked(tokenizer: llguidance.LLTokenizer, source: str) -> dict[str, Any]:
    """The verdict of a fork, or how it died."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(1)  # else whoever asked would not see this program's end before the fork's
            _limit()
            os.write(writer, json.dumps(on_stack(STACK // 2, lambda: _verdict(tokenizer, source))).encode())
        finally:
            os._exit(0)
    os.close(writer)
    said, limit = b"", time.monotonic() + WALL_SECONDS
    while select.select([reader], [], [], max(0.0, limit - time.monotonic()))[0] and (more := os.read(reader, 65536)):
        said += more
    os.close(reader)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # if it is still at it: it has closed the pipe, or its time is over
    status = os.waitpid(pid, 0)[1]
    if said:
        answer: dict[str, Any] = json.loads(said)
        return answer
    return {"died": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}


def main() -> None:
    """Answer grammars until the input ends, or for as long as some come. The first answer says that it is ready."""
    setup = read_frame(0)
    if setup is None:
        return
    tokenizer = built_tokenizer(setup["tokenizer"], setup["vocab_size"], setup["end_ids"])
    _write(frame({"ready": True}))
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        request = read_frame(0)
        if request is None:
            return
        _write(frame(_forked(tokenizer, request["source"])))


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
