"""Large and hostile grammars, the process that tries them out, answers that run into the limits, and memory."""

from __future__ import annotations

import itertools
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from agentspec.backends.torch.grammars import grammar as module
from agentspec.backends.torch.grammars import worker
from agentspec.backends.torch.grammars.grammar import GrammarCompiler
from agentspec.errors import EngineError, InvalidRequestError, OverloadedError, ShuttingDownError

END = 256
EXPLODES = 'start: "x" ("b" "c" | "(" X)\nX: /(a|aa){3000}/'


def large(number: int) -> str:
    """A form that is tried out first."""
    return chain(1500 + number)


def chain(count: int, kind: str = "r") -> str:
    first = f"start: {kind}0\n" + "\n".join(f'{kind}{i}: "a" {kind}{i + 1}' for i in range(count))
    return first + f'\n{kind}{count}: "z"'


@pytest.fixture
def grammars(byte_tokens: Any) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_tokens, 259, [END])
    yield made
    made.close()


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
        ("start: /((a{999}){999}){999}/", "memory|too many ways"),
    ],
    ids=["rules", "terminals", "expressions", "counts"],  # pytest tells a test's name to child processes
)
def test_a_grammar_that_ends_its_compiler_is_refused_and_the_next_is_taken(
    grammars: GrammarCompiler, source: str, says: str
) -> None:
    assert module.is_large(source)
    with pytest.raises(InvalidRequestError, match=says) as caught:
        grammars.compile(source, param="p")
    assert caught.value.param == "p"
    assert grammars.compile(large(0), param="p").start().allows(ids(grammars._tokenizer, "a")[0])


def test_without_a_process_small_grammars_are_compiled(byte_tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "executable", "/nothing")
    grammars = GrammarCompiler(byte_tokens, 259, [END])
    grammars.compile('start: "a"', param="p")
    with pytest.raises(EngineError, match="no process can be started"):
        grammars.compile(large(0), param="p2")
    monkeypatch.undo()
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="does not start"):
        grammars.compile(large(0), param="p2")


def test_closing_does_not_wait_for_what_is_compiled(byte_tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.worker, "__file__", "/dev/stdin")  # a program that waits for ever
    grammars, errors = GrammarCompiler(byte_tokens, 259, [END]), list[Exception]()

    def ask() -> None:
        try:
            grammars.compile(large(0), param="p")
        except Exception as error:
            errors.append(error)

    monkeypatch.setattr(subprocess.Popen, "communicate", lambda process, asked, timeout: (b"", process.wait()))
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


def test_a_machine_without_time_is_no_verdict(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module, "MOST_SECONDS", 0.0)
        with pytest.raises(OverloadedError):
            grammars.compile(large(5), param="p")
    grammars.compile(large(5), param="p")


def run_into_the_limits(state: module.GrammarMatcher, byte_tokens: Any) -> InvalidRequestError:
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
    monkeypatch.setattr(module, "QUICK_SECONDS", 9.0)
    grammar = module.CompiledGrammar(grammars.table, EXPLODES, "p")
    good = [grammar.start() for _ in range(3)]
    for step, token in enumerate(ids(byte_tokens, "xbc")):
        run_into_the_limits(grammar.start(), byte_tokens)
        for state in good[step:]:
            assert bool(state.mask()[token]) and state.allows(token)
        for state in good:
            state.advance(token)
    for state in good:
        assert state.forced() == [END]
    assert grammar.broken


def test_others_in_a_form_that_compiles_slowly_are_told_to_send_the_request_again(
    grammars: GrammarCompiler, byte_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUICK_SECONDS", -1.0)
    grammar = module.CompiledGrammar(grammars.table, EXPLODES, "p")
    good = grammar.start()
    run_into_the_limits(grammar.start(), byte_tokens)
    assert grammar.broken
    with pytest.raises(OverloadedError, match="another answer") as caught:
        good.mask()
    assert caught.value.status == 429 and caught.value.retry_after


@pytest.mark.parametrize("slow", [False, True])
def test_an_answer_whose_masks_take_long_ends(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    """Small forms are not tried out before."""
    state, clock, masks = grammars.compile("start: /x*/", param="p").start(), itertools.count(), 0
    seconds = worker.STEP_SECONDS * (2.0 if slow else 0.5)
    monkeypatch.setattr("time.thread_time", lambda: next(clock) * seconds)
    with pytest.raises(InvalidRequestError, match="takes 50 ms") if slow else nullcontext():
        while masks < 4 * module.TIMED_MASKS:
            masks += bool(state.mask().any())
    assert masks == (module.TIMED_MASKS - 1 if slow else 4 * module.TIMED_MASKS)


def test_a_draft_beyond_the_limits_does_not_end_the_answer(grammars: GrammarCompiler, byte_tokens: Any) -> None:
    grammar = module.CompiledGrammar(grammars.table, EXPLODES, "p")
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


def test_what_is_compiled_is_bounded_of_one_tenant_and_sound(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT", 3)
    first = grammars.compile('start: "a"', param="p", tenant="one")
    assert grammars.known('start: "a"', param="p", tenant="one") is first
    assert grammars.known('start: "a"', param="p", tenant="two") is None
    broken = grammars.compile('start: "b"', param="p", tenant="one")
    broken.broken = True
    assert grammars.compile('start: "b"', param="p", tenant="one") is not broken
    for letter in "cde":
        grammars.compile(f'start: "{letter}"', param="p", tenant="one")
    assert grammars.known('start: "a"', param="p", tenant="one") is None and len(grammars._kept) == 3
