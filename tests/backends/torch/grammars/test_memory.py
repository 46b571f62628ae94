"""What ever new forms may take of this process's memory: in bytes that are allocated, whatever the system keeps."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from agentspec.backends.torch.grammars import compiler, matcher
from agentspec.backends.torch.grammars.compiler import GrammarCompiler
from agentspec.backends.torch.grammars.worker import FEW_STATES, MOST_STATES, STATE_BYTES
from agentspec.errors import InvalidRequestError

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


@pytest.fixture
def grammars(byte_tokens: Any) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(byte_tokens, 259, [END])
    yield made
    made.close()


def greedy(number: int) -> str:
    """A form of few characters whose lexer finds new states for ever."""
    return f"start: /(.*[ae].{{{50 + number}}}[a-z])+/"


def used(grammar: matcher.CompiledGrammar, answers: int) -> list[matcher.GrammarMatcher]:
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
    monkeypatch.setattr(compiler, "KEPT_BYTES", 24 << 20)
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
    monkeypatch.setattr(matcher, "RENEWAL_SECONDS", -1.0)
    grammar = grammars.compile(greedy(1), param="p")
    states = used(grammar, 100)  # more than a lexer of few states holds
    assert {len(state._tokens) for state in states} == {60} and not grammar.sound_lexer().broken


def test_forms_that_grew_since_they_were_kept_make_room(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "KEPT_BYTES", (MOST_STATES + FEW_STATES) * STATE_BYTES)
    sources = ['start: "a"', 'start: "b"', greedy(1)]
    kept = [grammars.compile(source, param="p") for source in sources]
    used(kept[-1], 200)
    assert grammars.compile(sources[0], param="p") is kept[0]
    assert sum(one.nbytes for one in grammars._kept.values()) <= compiler.KEPT_BYTES


def test_a_form_that_needs_many_states_at_once_gets_them(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher, "FEW_STATES", 2)
    grammar = grammars.compile("start: /[ab]{3}|x[yz]/", param="p")
    assert grammar.sound_lexer().states == MOST_STATES and not grammar.sound_lexer().broken
