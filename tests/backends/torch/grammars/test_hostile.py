"""Large and hostile grammars: the process that tries them out, and answers that run into the limits."""

from __future__ import annotations

import itertools
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from agentspec.backends.torch.grammars import compiler, matcher, worker
from agentspec.backends.torch.grammars.compiler import GrammarCompiler
from agentspec.errors import EngineError, InvalidRequestError, OverloadedError, ShuttingDownError

END = 256
EXPLODES = 'start: "x" ("b" "c" | "(" X)\nX: /(a|aa){3000}/'


def large(number: int) -> str:
    """A form that is tried out first."""
    return chain(1500 + number)


def chain(count: int, kind: str = "r") -> str:
    first = f"start: {kind}0\n" + "\n".join(f'{kind}{i}: "a" {kind}{i + 1}' for i in range(count))
    return first + f'\n{kind}{count}: "z"'


@pytest.fixture(scope="module")
def grammars(byte_tokens: Any) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_tokens, 259, [END])
    yield compiler
    compiler.close()


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (chain(30_000), "stack"),
        (chain(40_000, "R"), "stack"),
        (
            "start: T\nT: " + " & ".join(f"/(.*a.{{{count}}})/" for count in range(1, 30)),
            "seconds|memory|too many ways",
        ),
        ("start: /((a{999}){999}){999}/", "too many ways"),
    ],
    ids=["rules", "terminals", "expressions", "counts"],  # pytest tells a test's name to child processes
)
def test_a_grammar_that_ends_its_compiler_is_refused_and_the_next_is_taken(
    grammars: GrammarCompiler, source: str, says: str
) -> None:
    assert grammars.waits(source, param="p")
    with pytest.raises(InvalidRequestError, match=says) as caught:
        grammars.compile(source, param="p")
    assert caught.value.param == "p"
    assert grammars.compile(large(0), param="p").start().allows(ids(grammars._tokenizer, "a")[0])


def test_without_a_process_small_grammars_are_compiled(byte_tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.sys, "executable", "/nothing")
    grammars = GrammarCompiler(byte_tokens, 259, [END])
    grammars.compile('start: "a"', param="p")
    with pytest.raises(EngineError, match="no process can be started"):
        grammars.compile(large(0), param="p2")
    monkeypatch.undo()
    monkeypatch.setattr(compiler.sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="does not start"):
        grammars.compile(large(0), param="p2")


def test_closing_does_not_wait_for_what_is_compiled(byte_tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.worker, "__file__", "/dev/stdin")  # a program that waits for ever
    grammars, errors = GrammarCompiler(byte_tokens, 259, [END]), list[Exception]()

    def ask() -> None:
        try:
            grammars.compile(large(0), param="p")
        except Exception as error:
            errors.append(error)

    monkeypatch.setattr(subprocess.Popen, "communicate", lambda process, asked: (b"", process.wait()))
    thread = threading.Thread(target=ask)
    thread.start()
    while grammars._trial._process is None:
        thread.join(0.01)
    grammars.close()
    thread.join(60)
    assert grammars._trial._process.poll() == -signal.SIGKILL
    assert [type(error) for error in errors] == [ShuttingDownError]
    with pytest.raises(ShuttingDownError):
        grammars.compile(large(1), param="p")


def test_a_grammar_that_takes_much_memory_is_refused(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_GRAMMAR_BYTES", 0)
    with pytest.raises(InvalidRequestError, match="0 MiB"):
        grammars.compile(large(6), param="p")


def test_a_machine_without_time_is_no_verdict(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "MOST_SECONDS", 0.0)
        with pytest.raises(OverloadedError):
            grammars.compile(large(5), param="p")
    grammars.compile(large(5), param="p")


def test_what_is_kept_is_bounded(byte_tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(byte_tokens, 259, [END])
    monkeypatch.setattr(compiler, "KEPT_BYTES", 100 + 2 * worker.FEW_STATES * worker.STATE_BYTES)
    first = grammars.compile(f'start: "{"a" * 40}"', param="p")
    assert grammars.compile(f'start: "{"a" * 40}"', param="p") is first
    for letter in "bc":
        grammars.compile(f'start: "{letter * 40}"', param="p")
    assert grammars.compile(f'start: "{"a" * 40}"', param="p") is not first


def test_a_worn_grammar_is_compiled_again(grammars: GrammarCompiler) -> None:
    first = grammars.compile(large(4), param="p")
    for _ in range(matcher.MAX_STARTS):
        assert grammars.compile(large(4), param="p") is first
        first.start()
    assert grammars.waits(large(4), param="p")  # so that a burst compiles it once
    assert grammars.compile(large(4), param="p") is not first


def run_into_the_limits(state: matcher.GrammarMatcher, byte_tokens: Any) -> InvalidRequestError:
    """Follow the part of `EXPLODES` that breaks the lexer, up to the error with which the answer ends."""
    with pytest.raises(InvalidRequestError, match="too many ways") as caught:
        for token in ids(byte_tokens, "x(" + "a" * 400):
            state.mask()
            state.advance(token)
    assert caught.value.param == "p" and "state" not in caught.value.message
    return caught.value


def test_an_answer_that_breaks_the_lexer_ends_alone(
    grammars: GrammarCompiler, byte_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on where they were, again and again."""
    monkeypatch.setattr(matcher, "RENEWAL_SECONDS", 9.0)
    grammar = compiler.CompiledGrammar(grammars.table, EXPLODES, "p")
    good = [grammar.start() for _ in range(3)]
    for step, token in enumerate(ids(byte_tokens, "xbc")):
        run_into_the_limits(grammar.start(), byte_tokens)
        for state in good[step:]:
            assert bool(state.mask()[token]) and state.allows(token)
        for state in good:
            state.advance(token)
    for state in good:
        assert state.forced() == [END]
    assert not grammar.worn and grammar.start().allows(ids(byte_tokens, "x")[0])


def test_others_in_a_form_that_compiles_slowly_are_told_to_send_the_request_again(
    grammars: GrammarCompiler, byte_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher, "RENEWAL_SECONDS", -1.0)
    grammar = compiler.CompiledGrammar(grammars.table, EXPLODES, "p")
    good = grammar.start()
    run_into_the_limits(grammar.start(), byte_tokens)
    assert grammar.worn
    for ask in (good.mask, grammar.start):
        with pytest.raises(OverloadedError, match="another answer") as caught:
            ask()
        assert caught.value.status == 429 and caught.value.retry_after


def test_the_lexer_that_answers_filled_up_together_is_replaced_for_all(
    grammars: GrammarCompiler, byte_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer with which it was full did nothing that the others did not."""
    monkeypatch.setattr(matcher, "RENEWAL_SECONDS", 9.0)
    grammar = compiler.CompiledGrammar(grammars.table, "start: /a[xy]{100}|b[xz]{100}/", "p")
    grammar._lexer = grammar._compiled(60)
    states, full = [grammar.start(), grammar.start()], grammar.sound_lexer()
    for state, text in zip(states, ("a" + "x" * 40, "b" + "x" * 40), strict=True):
        for token in ids(byte_tokens, text):
            assert bool(state.mask()[token])
            state.advance(token)
    assert full.broken and grammar.sound_lexer() is not full


@pytest.mark.parametrize("slow", [False, True])
def test_an_answer_whose_masks_take_long_ends(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    """Small forms are not tried out before."""
    state, clock, masks = grammars.compile("start: /x*/", param="p").start(), itertools.count(), 0
    seconds = worker.STEP_SECONDS * (2.0 if slow else 0.5)
    monkeypatch.setattr("time.thread_time", lambda: next(clock) * seconds)
    with pytest.raises(InvalidRequestError, match="takes 50 ms") if slow else nullcontext():
        while masks < 4 * worker.TRIED_TOKENS:
            masks += bool(state.mask().any())
    assert masks == (worker.TRIED_TOKENS - 1 if slow else 4 * worker.TRIED_TOKENS)


def test_a_draft_beyond_the_limits_does_not_end_the_answer(grammars: GrammarCompiler, byte_tokens: Any) -> None:
    grammar = compiler.CompiledGrammar(grammars.table, EXPLODES, "p")
    state = grammar.start()
    drafted = ids(byte_tokens, "x(aaaaaaaa")
    admitted = state.admitted(drafted, list(range(-1, len(drafted) - 1)))
    assert admitted[:2] == [0, 1]
    for token in ids(byte_tokens, "xbc"):
        assert bool(state.mask()[token])
        state.advance(token)
    assert state.allows(END)


def test_an_answer_is_followed_on_a_small_stack(grammars: GrammarCompiler) -> None:
    grammar = grammars.compile(chain(190), param="p")

    def follow() -> int:
        state = grammar.start()
        for _ in range(30):
            state.advance(int(state.mask().nonzero()[0]))
        return len(state.forced())

    assert worker.on_stack(256 << 10, follow) > 0


def test_errors_cross_a_thread() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        worker.on_stack(1 << 20, fail)
