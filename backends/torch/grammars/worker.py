"""Compiles grammars, and the program that tries out a large one in a process that may die.

The program reads a tokenizer and a grammar, compiles the grammar and walks some tokens of an answer under limits of
processor time, memory and stack, and prints its verdict, all in JSON. It imports nothing of agentspec, so that it
starts fast: run it by its path.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import llguidance

T = TypeVar("T")

STACK: Final = 64 << 20  # bytes of stack where a grammar is compiled; on trial it has half of that
CPU_SECONDS: Final = 4
MEMORY: Final = 512 << 20
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


def built_tokenizer(tokenizer: str, vocab_size: int, end_ids: list[int]) -> llguidance.LLTokenizer:
    """The tables of a tokenizer, given as the JSON text of a fast tokenizer; about a second for a large vocabulary."""
    return llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=end_ids)


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


def _pages(field: int) -> int:
    """Bytes of this process by /proc: of field 0 all, of field 1 those in memory; 0 where the system does not tell."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[field]) * resource.getpagesize()
    return 0


def _limit() -> None:
    """Limit what this process takes for the grammar: processor time, and memory where the system tells it."""
    _limit_to(resource.RLIMIT_CPU, int(time.process_time()) + CPU_SECONDS)
    if size := _pages(0):
        _limit_to(resource.RLIMIT_AS, size + MEMORY)


def _limit_to(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _verdict(tokenizer: llguidance.LLTokenizer, source: str) -> dict[str, Any]:
    before = _pages(1)
    try:
        matcher = compiled(tokenizer, source)
        taken = max(0, _pages(1) - before)
        walk(matcher)
    except ValueError as error:
        return {"error": str(error)[:2000]}
    return {"nbytes": taken}


def main() -> None:
    """Print how many bytes the grammar takes, or the error with which it is refused."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.load(sys.stdin)
    source = asked.pop("source")
    tokenizer = built_tokenizer(**asked)
    _limit()
    print(json.dumps(on_stack(STACK // 2, partial(_verdict, tokenizer, source))), flush=True)


if __name__ == "__main__":
    main()
