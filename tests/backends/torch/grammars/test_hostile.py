"""Large and hostile grammars, the process that tries them out, answers that run into the limits, and memory."""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from agentspec.backends.torch.grammars import grammar as module
from agentspec.backends.torch.grammars import worker
from agentspec.backends.torch.grammars.grammar import GrammarCompiler
from agentspec.backends.torch.grammars.worker import FEW_STATES, MOST_STATES, STATE_BYTES
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
    monkeypatch.setattr(module, "MAX_GRAMMAR_BYTES", 0)
    with pytest.raises(InvalidRequestError, match="0 MiB"):
        grammars.compile(large(6), param="p")


def test_a_machine_without_time_is_no_verdict(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module, "MOST_SECONDS", 0.0)
        with pytest.raises(OverloadedError):
            grammars.compile(large(5), param="p")
    grammars.compile(large(5), param="p")


def test_what_is_kept_is_bounded(byte_tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(byte_tokens, 259, [END])
    monkeypatch.setattr(module, "KEPT_BYTES", 100 + 2 * worker.FEW_STATES * worker.STATE_BYTES)
    first = grammars.compile(f'start: "{"a" * 40}"', param="p")
    assert grammars.compile(f'start: "{"a" * 40}"', param="p") is first
    for letter in "bc":
        grammars.compile(f'start: "{letter * 40}"', param="p")
    assert grammars.compile(f'start: "{"a" * 40}"', param="p") is not first


def test_a_worn_grammar_is_compiled_again(grammars: GrammarCompiler) -> None:
    first = grammars.compile(large(4), param="p")
    for _ in range(module.MAX_STARTS):
        assert grammars.compile(large(4), param="p") is first
        first.start()
    assert grammars.waits(large(4), param="p")  # so that a burst compiles it once
    assert grammars.compile(large(4), param="p") is not first


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
    monkeypatch.setattr(module, "RENEWAL_SECONDS", 9.0)
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
    assert not grammar.worn and grammar.start().allows(ids(byte_tokens, "x")[0])


def test_others_in_a_form_that_compiles_slowly_are_told_to_send_the_request_again(
    grammars: GrammarCompiler, byte_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEWAL_SECONDS", -1.0)
    grammar = module.CompiledGrammar(grammars.table, EXPLODES, "p")
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
    monkeypatch.setattr(module, "RENEWAL_SECONDS", 9.0)
    grammar = module.CompiledGrammar(grammars.table, "start: /a[xy]{100}|b[xz]{100}/", "p")
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


END = 256
LETTERS = {chr(33 + place): place for place in range(94)}  # tokens are bytes, in the order of GPT-2
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class Allocated(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def allocated() -> int:
    """Bytes that this process has allocated and not freed, by glibc's count."""
    counts = ctypes.CDLL(None).mallinfo2
    counts.restype = Allocated
    gc.collect()
    found = counts()
    return int(found.uordblks + found.hblkhd)


def greedy(number: int) -> str:
    """A form of few characters whose lexer finds new states for ever."""
    return f"start: /(.*[ae].{{{50 + number}}}[a-z])+/"


def used(grammar: module.CompiledGrammar, answers: int) -> list[module.GrammarMatcher]:
    """Begin answers of 60 random letters each, which differ; where the limits end one, the next begins."""
    chosen, states = random.Random(1), []
    for _ in range(answers):
        states.append(grammar.start())
        with suppress(InvalidRequestError):
            for _ in range(60):
                states[-1].advance(LETTERS[chosen.choice("abcxe")])
    return states


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2") or sys.platform != "linux", reason="counts of glibc")
def test_forms_that_answers_fill_up_stay_within_the_budget(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 24 << 20)
    used(grammars.compile(greedy(0), param="p"), 100)  # whatever is allocated once
    before, taken = allocated(), []
    for number in range(1, 11):
        used(grammars.compile(greedy(number), param="p"), 250)
        taken.append(allocated() - before)
    assert max(taken) <= 24 << 20, [f"{size >> 20} MiB" for size in taken]
    assert taken[-1] > 1 << 20  # they do fill up


def test_a_form_counts_as_the_most_that_its_lexer_may_hold(grammars: GrammarCompiler) -> None:
    source = greedy(1)
    grammar = grammars.compile(source, param="p")
    assert grammar.nbytes == len(source) + FEW_STATES * STATE_BYTES
    states = used(grammar, 200)
    assert {len(state._tokens) for state in states} == {60}  # those it was too small for went on with another one
    assert grammar.sound_lexer().states == MOST_STATES  # for the answers that come
    assert grammar.nbytes == len(source) + MOST_STATES * STATE_BYTES


def test_a_form_that_is_compiled_slowly_has_many_states_from_the_start(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers cannot wait for another lexer."""
    monkeypatch.setattr(module, "RENEWAL_SECONDS", -1.0)
    grammar = grammars.compile(greedy(1), param="p")
    states = used(grammar, 100)  # more than a lexer of few states holds
    assert {len(state._tokens) for state in states} == {60} and not grammar.sound_lexer().broken


def test_forms_that_grew_since_they_were_kept_make_room(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", (MOST_STATES + FEW_STATES) * STATE_BYTES)
    sources = ['start: "a"', 'start: "b"', greedy(1)]
    kept = [grammars.compile(source, param="p") for source in sources]
    used(kept[-1], 200)
    assert grammars.compile(sources[0], param="p") is kept[0]
    assert sum(one.nbytes for one in grammars._kept.values()) <= module.KEPT_BYTES


def test_a_form_that_needs_many_states_at_once_gets_them(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FEW_STATES", 2)
    grammar = grammars.compile("start: /[ab]{3}|x[yz]/", param="p")
    assert grammar.sound_lexer().states == MOST_STATES and not grammar.sound_lexer().broken
