"""Compiles grammars, and the program that tries out a large one in a process that may die.

The program reads a tokenizer and a grammar, compiles the grammar and follows an answer for a few tokens under limits of
processor time, memory and stack, and prints the error, if any, all in JSON. It imports nothing of agentspec, so that it
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
from typing import Final, TypeVar

import llguidance

T = TypeVar("T")

STACK: Final = 64 << 20  # bytes of stack where a grammar is compiled; on trial it has half of that
CPU_SECONDS: Final = 4
MEMORY: Final = 256 << 20  # bytes that compiling may take
TRIED_TOKENS: Final = 24
STEP_SECONDS: Final = 0.025  # processor time of a step on average, beyond which a grammar would slow other answers
# A lexer finds its states as answers go on and stores them: usual forms need hundreds; 28 MB were measured of 25,000.
LIMITS: Final = llguidance.LLParserLimits(
    max_items_in_row=8_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=10_000,
    max_grammar_size=500_000,
    precompute_large_lexemes=True,
    verbose_errors=False,  # they would show the parser's state to clients
)
_stacks = threading.Lock()


def built_tokenizer(tokenizer: str, vocab_size: int, end_ids: list[int]) -> llguidance.LLTokenizer:
    """The tables of a tokenizer, given as the JSON text of a fast tokenizer; about a second for a large vocabulary."""
    return llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=end_ids)


def compiled(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """The grammar at the start of an answer. Raises `ValueError` with llguidance's message."""
    try:
        matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    except Exception as error:
        raise ValueError(str(error)) from None
    except BaseException as error:  # a panic of Rust is no `Exception`
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError("panic") from None
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def on_stack(size: int, function: Callable[[], T]) -> T:
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


def _limit() -> None:
    """Limit what this process takes for the grammar: processor time, and memory where the system reports it."""
    _limit_to(resource.RLIMIT_CPU, int(time.process_time()) + CPU_SECONDS)
    with suppress(OSError), open("/proc/self/statm") as file:
        _limit_to(resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize() + MEMORY)


def _limit_to(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _error(tokenizer: llguidance.LLTokenizer, source: str) -> str:
    """Why the grammar is refused; empty if it can be compiled and followed."""
    try:
        state = compiled(tokenizer, source)
    except ValueError as error:
        return str(error)[:2000]
    started, steps = time.thread_time(), 0
    while steps < TRIED_TOKENS:
        steps += 1
        bits = state.compute_bitmask()
        at = next((index for index, byte in enumerate(bits) if byte), None)
        state.compute_ff_tokens()
        if at is None or not state.consume_token(at * 8 + bits[at].bit_length() - 1):
            break
    if state.is_error():
        return state.get_error()[:2000]
    seconds = (time.thread_time() - started) / steps
    slow = f"each of its tokens takes {seconds * 1000:.0f} ms: shorten its texts and repetitions"
    return slow if seconds > STEP_SECONDS else ""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.load(sys.stdin)
    source = asked.pop("source")
    tokenizer = built_tokenizer(**asked)
    _limit()
    print(json.dumps(on_stack(STACK // 2, lambda: _error(tokenizer, source))), flush=True)


if __name__ == "__main__":
    main()
