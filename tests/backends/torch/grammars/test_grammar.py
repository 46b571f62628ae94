"""A grammar's state, what a wrong grammar is answered, hostile grammars, and answers that run into the limits."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.grammars.grammar import (
    STORED,
    TIMED_MASKS,
    CompiledGrammar,
    GrammarCompiler,
    GrammarMatcher,
)
from agentspec.errors import EngineError, InvalidRequestError, OverloadedError, ShuttingDownError

END = 256
EXPLODES = 'start: "x" ("b" "c" | "(" X)\nX: /(a|aa){3000}/'


@pytest.fixture
def grammars(byte_tokens: Any) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_tokens, 259, [END])
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(byte_tokens: Any) -> GrammarCompiler:
    return GrammarCompiler(byte_tokens, 259, [END])


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def chain(count: int, kind: str = "r") -> str:
    """A grammar of many rules, or of many terminals, each of which refers to the next."""
    first = f"start: {kind}0\n" + "\n".join(f'{kind}{i}: "a" {kind}{i + 1}' for i in range(count))
    return first + f'\n{kind}{count}: "z"'


LARGE = chain(1500)  # is tried out first


def admitted_one_by_one(grammar: CompiledGrammar, tokens: list[int], parents: list[int]) -> list[int]:
    """The nodes whose whole path a fresh state follows."""
    admitted = []
    for node in range(len(tokens)):
        path, at = [], node
        while at >= 0:
            path, at = [tokens[at], *path], parents[at]
        state, fits = grammar.start(), END not in path[:-1]
        for token in path:
            fits = fits and 0 <= token < 259 and state.allows(token)
            if fits:
                state.advance(token)
        if fits:
            admitted.append(node)
    return admitted


@given(data=st.data())
def test_a_tree_is_cut_to_the_paths_that_are_allowed_alone(
    shared: GrammarCompiler, byte_tokens: Any, data: Any
) -> None:
    grammar = shared.compile('start: /a*/ ("b" /[ab]/)* "c"?', param="p")
    alphabet = [*ids(byte_tokens, "abcd"), END, -1, 10**6]
    tokens = data.draw(st.lists(st.sampled_from(alphabet), max_size=14))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(tokens))]
    state = grammar.start()
    for _ in range(2):  # the state does not move
        assert state.admitted(tokens, parents) == admitted_one_by_one(grammar, tokens, parents)


def run_instead(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shell script stand in for the process that tries out grammars."""
    script = folder / "program"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))  # there is no other way to replace it


@pytest.mark.parametrize(
    ("program", "error", "says"),
    [
        ("exit 1", EngineError, "does not start"),
        ("kill -KILL $$", OverloadedError, "no time or memory"),
        ("kill -SEGV $$", InvalidRequestError, "too much stack"),
        ("kill -XCPU $$", InvalidRequestError, "more than 4 seconds"),
    ],
)
def test_the_exit_status_of_a_trial_gives_its_error(
    grammars: GrammarCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, error: Any, says: str
) -> None:
    run_instead(program, tmp_path, monkeypatch)
    with pytest.raises(error, match=says):
        grammars.compile(LARGE, param="p")
    (tmp_path / "program").unlink()
    grammars.compile('start: "a"', param="p")
    with pytest.raises(EngineError, match="no process can be started"):
        grammars.compile(LARGE, param="p")


def test_closing_ends_a_running_compilation(
    grammars: GrammarCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_instead(f"touch {tmp_path}/started; exec sleep 600", tmp_path, monkeypatch)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            grammars.compile(LARGE, param="p")
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not (tmp_path / "started").exists():
        thread.join(0.01)
    grammars.close()
    thread.join(60)
    assert [type(error) for error in errors] == [ShuttingDownError]
    with pytest.raises(ShuttingDownError):
        grammars.compile(chain(1501), param="p")


def run_into_the_limits(state: GrammarMatcher, byte_tokens: Any) -> None:
    """Follow the part of `EXPLODES` that breaks the lexer, up to the error with which the answer ends."""
    with pytest.raises(InvalidRequestError, match="too many ways") as caught:
        for token in ids(byte_tokens, "x(" + "a" * 400):
            state.mask()
            state.advance(token)
    assert caught.value.param == "p" and "state" not in caught.value.message


def test_an_answer_that_breaks_the_lexer_ends_alone(grammars: GrammarCompiler, byte_tokens: Any) -> None:
    """Others go on where they were, again and again; those in a form that compiles slowly are to be sent again."""
    grammar = CompiledGrammar(grammars.table, EXPLODES, "p")
    grammar.quick = True
    good = [grammar.start() for _ in range(3)]
    for step, token in enumerate(ids(byte_tokens, "xbc")):
        run_into_the_limits(grammar.start(), byte_tokens)
        for state in good[step:]:
            assert bool(state.mask()[token]) and state.allows(token)
        for state in good:
            state.advance(token)
    assert [state.forced() for state in good] == [[END]] * 3 and grammar.broken
    slow = CompiledGrammar(grammars.table, EXPLODES, "p")
    slow.quick = False
    other = slow.start()
    run_into_the_limits(slow.start(), byte_tokens)
    with pytest.raises(OverloadedError, match="another answer") as caught:
        other.mask()
    assert slow.broken and caught.value.status == 429 and caught.value.retry_after


@pytest.mark.parametrize("slow", [False, True])
def test_slow_masks_end_the_answer(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    """Small forms are not tried out before."""
    state, clock, masks = grammars.compile("start: /x*/", param="p").start(), itertools.count(), 0
    seconds = 0.05 if slow else 0.0125
    monkeypatch.setattr("time.thread_time", lambda: next(clock) * seconds)  # no grammar is slow on every machine
    with pytest.raises(InvalidRequestError, match="takes 50 ms") if slow else nullcontext():
        while masks < 4 * TIMED_MASKS:
            masks += bool(state.mask().any())
    assert masks == (TIMED_MASKS - 1 if slow else 4 * TIMED_MASKS)


def test_a_draft_beyond_the_limits_does_not_end_the_answer(grammars: GrammarCompiler, byte_tokens: Any) -> None:
    state = CompiledGrammar(grammars.table, EXPLODES, "p").start()
    drafted = ids(byte_tokens, "x(aaaaaaaa")
    assert state.admitted(drafted, list(range(-1, len(drafted) - 1)))[:2] == [0, 1]
    for token in ids(byte_tokens, "xbc"):
        assert bool(state.mask()[token])
        state.advance(token)
    assert state.allows(END)


def test_an_answer_is_followed_on_a_small_stack(grammars: GrammarCompiler) -> None:
    state, usual = grammars.compile(chain(190), param="p").start(), threading.stack_size()

    def answer() -> None:
        for _ in range(30):
            state.advance(int(state.mask().nonzero()[0]))

    threading.stack_size(256 << 10)
    try:
        thread = threading.Thread(target=answer)
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    assert state.forced()


def test_compiled_grammars_are_stored_per_tenant_and_bounded(grammars: GrammarCompiler) -> None:
    first = grammars.compile('start: "a"', param="p", tenant="one")
    assert grammars.compile('start: "a"', param="p", tenant="one") is first
    assert grammars.known('start: "a"', param="p", tenant="two") is None
    broken = grammars.compile('start: "b"', param="p", tenant="one")
    broken.broken = True
    assert grammars.compile('start: "b"', param="p", tenant="one") is not broken
    for number in range(STORED - 1):
        grammars.compile(f'start: "{number}"', param="p", tenant="one")
    assert grammars.known('start: "a"', param="p", tenant="one") is None
    assert grammars.known('start: "b"', param="p", tenant="one") is not None
