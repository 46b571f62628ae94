"""What may not be drawn next whatever its logit: what a grammar rules out, bad words, an end too early."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.backends.torch.model.device import to_device
from agentspec.backends.torch.sampling.grammar import CompiledGrammar, GrammarMatcher


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """What constrains one answer: `choice` is its index, `bad_words` are token sequences.

    `shown` are special tokens that are kept in the answer's text, since its parser looks for them.
    """

    grammar: CompiledGrammar | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    choice: int = 0
    shown: frozenset[int] = frozenset()

    def start(self, min_tokens: int, end_ids: Collection[int], vocab_size: int) -> Constraints:
        """The constraints of an answer that has no token yet."""
        grammar = None if self.grammar is None else self.grammar.start()
        return Constraints(grammar, self.bad_words, min_tokens, end_ids, vocab_size)


class Constraints:
    """What one answer may be continued by. A constraint that would leave no token at all is dropped for that token.

    A bad word is barred at its last token, once its others were generated; ends are barred before `min_tokens`.
    """

    def __init__(
        self,
        grammar: GrammarMatcher | None = None,
        bad_words: Sequence[tuple[int, ...]] = (),
        min_tokens: int = 0,
        end_ids: Collection[int] = (),
        vocab_size: int = 0,
    ) -> None:
        self.grammar = grammar
        self._bad_words = bad_words
        self._longest = max(map(len, bad_words), default=1) - 1
        self._early = min_tokens if end_ids else 0
        self._end_ids = [token for token in end_ids if token < vocab_size]
        self._vocab_size = vocab_size
        self._recent: list[int] = []
        self._count = 0

    @property
    def idle(self) -> bool:
        """Whether everything may come next, now and ever after."""
        return self.grammar is None and not self._bad_words and self._count >= self._early

    def allow(self, token: int) -> bool:
        """Whether no constraint bars `token`. Cheap; one that is barred here may still be the only one left."""
        if token in self._barred():
            return False
        return self.grammar is None or self.grammar.allows(token)

    def apply(self, row: Tensor) -> Tensor:
        """`row` [vocab] with what may not come at minus infinity."""
        if self.idle:
            return row
        whole = self.grammar is None
        allowed = torch.ones(len(row), dtype=torch.bool) if self.grammar is None else self.grammar.mask()
        barred = self._barred()
        if barred:
            rest = allowed.clone()
            rest[barred] = False
            allowed, whole = (rest, False) if bool(rest.any()) else (allowed, whole)
        return row if whole else row.masked_fill(to_device(~allowed, row.device), float("-inf"))

    def observe(self, token: int) -> None:
        """The answer now ends in `token`."""
        self._count += 1
        if self._longest:
            self._recent = [*self._recent, token][-self._longest :]
        if self.grammar is not None:
            self.grammar.advance(token)

    def _barred(self) -> list[int]:
        early = self._end_ids if self._count < self._early else []
        recent = tuple(self._recent)
        return [*early, *(word[-1] for word in self._bad_words if recent[len(recent) - len(word) + 1 :] == word[:-1])]
