"""What may not come next: rules that compose, and yield rather than leave nothing to say."""

from __future__ import annotations

from typing import Any

import torch

from agentspec.backends.torch.grammars.grammar import GrammarCompiler
from agentspec.backends.torch.sampling.constraints import Constraints, ThinkingLimit

END = 256


def left(limits: Constraints, vocab: int = 259) -> set[int]:
    return set(torch.isfinite(limits.apply(torch.zeros(vocab))).nonzero()[:, 0].tolist())


def test_a_bad_word_is_barred_at_its_last_token_only() -> None:
    limits = Constraints(bad_words=((1,), (2, 3), (2, 2, 0)))
    assert left(limits, 5) == {0, 2, 3, 4}
    limits.observe(2)
    assert left(limits, 5) == {0, 2, 4} and not limits.allow(3)
    limits.observe(2)
    assert left(limits, 5) == {2, 4}
    limits.observe(4)
    assert left(limits, 5) == {0, 2, 3, 4}


def test_a_rule_yields_where_nothing_would_be_left(byte_tokens: Any) -> None:
    a, b = byte_tokens.encode("ab")
    grammar = GrammarCompiler(byte_tokens, 259, [END]).compile('start: "a" "b"?', param="p")
    limits = Constraints(grammar.start(), ((a,),), min_tokens=9, end_ids={END}, vocab_size=259)
    assert left(limits) == {a} and not limits.allow(a)
    limits.observe(a)
    assert left(limits) == {b}  # not the end, which is early
    limits.observe(b)
    assert left(limits) == {END}


BEGIN, OVER = 1, 2  # of thinking


def test_thinking_that_the_prompt_began_ends_after_its_budget() -> None:
    limits = Constraints(thinking=ThinkingLimit(2, OVER, BEGIN, begun=True))
    for token in (3, 4):
        assert left(limits, 5) == {0, 1, 2, 3, 4} and not limits.idle
        limits.observe(token)
    assert left(limits, 5) == {OVER} and limits.allow(OVER) and not limits.allow(3)
    limits.observe(OVER)
    assert limits.idle and left(limits, 5) == {0, 1, 2, 3, 4}


def test_thinking_that_the_answer_begins_is_counted_from_there() -> None:
    limits = Constraints(thinking=ThinkingLimit(1, OVER, BEGIN))
    for token in (0, BEGIN, 3):  # a blank may come before
        assert limits.allow(3)
        limits.observe(token)
    assert left(limits, 5) == {OVER}


def test_an_answer_without_thinking_is_not_limited() -> None:
    for tokens in ((3, 3, BEGIN, 3), (OVER, 3), (BEGIN, OVER, 3)):
        limits = Constraints(thinking=ThinkingLimit(1, OVER, BEGIN))
        for token in tokens:
            limits.observe(token)
        assert limits.idle


def test_the_end_of_thinking_goes_before_bad_words_and_the_minimum_length_and_not_before_a_grammar(
    byte_tokens: Any,
) -> None:
    limits = Constraints(None, ((OVER,),), 9, {OVER}, 5, ThinkingLimit(0, OVER, begun=True))
    assert left(limits, 5) == {OVER}
    [a] = byte_tokens.encode("a")
    grammar = GrammarCompiler(byte_tokens, 259, [END]).compile('start: "a"', param="p")
    assert left(Constraints(grammar.start(), thinking=ThinkingLimit(0, OVER, begun=True))) == {a}
