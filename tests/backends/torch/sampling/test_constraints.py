"""What may not come next: rules that compose, and yield rather than leave nothing to say."""

from __future__ import annotations

from typing import Any

import torch

from agentspec.backends.torch.grammars.compiler import GrammarCompiler
from agentspec.backends.torch.sampling.constraints import Constraints

END = 256


def left(limits: Constraints, vocab: int = 259) -> set[int]:
    return set(torch.isfinite(limits.apply(torch.zeros(vocab))).nonzero()[:, 0].tolist())


def test_nothing_is_barred_without_rules() -> None:
    limits, row = Constraints(), torch.zeros(4)
    assert limits.idle and limits.apply(row) is row and limits.allow(3)


def test_ends_are_barred_until_enough_was_said() -> None:
    limits = Constraints(min_tokens=2, end_ids={1, 3, 99}, vocab_size=4)
    assert left(limits, 4) == {0, 2} and not limits.allow(3) and not limits.idle
    limits.observe(0)
    assert left(limits, 4) == {0, 2}
    limits.observe(0)
    assert left(limits, 4) == {0, 1, 2, 3} and limits.idle


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
