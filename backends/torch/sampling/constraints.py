"""Constraints on the next token: a grammar, bad words, end tokens before the minimum length, an end of thinking."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.backends.torch.grammars.grammar import CompiledGrammar, GrammarMatcher
from agentspec.backends.torch.model.device import to_device

_OPENING = 2  # tokens of an answer among which thinking must begin: blanks may come before


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """At most `tokens` tokens of thinking, which the token `end` ends.

    Thinking is `begun` by the prompt, or begins with the token `begin` at the start of the answer.
    """

    tokens: int
    end: int
    begin: int | None = None
    begun: bool = False


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """The constraints of one answer: `choice` is the answer's index, `bad_words` are token sequences.

    `shown` are special tokens that stay in the answer's text because its parser looks for them.
    """

    grammar: CompiledGrammar | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    choice: int = 0
    shown: frozenset[int] = frozenset()
    thinking: ThinkingLimit | None = None

    def start(self, min_tokens: int, end_ids: Collection[int], vocab_size: int) -> Constraints:
        """The `Constraints` at the start of an answer, which has no tokens yet."""
        grammar = None if self.grammar is None else self.grammar.start()
        return Constraints(grammar, self.bad_words, min_tokens, end_ids, vocab_size, self.thinking)


class Constraints:
    """Tracks which tokens may come next in one answer. If bad words and `min_tokens` would bar every token that the
    grammar allows, they are ignored for that token; so is the limit of thinking where the grammar bars its end.

    A bad word's last token is barred when its other tokens were just generated; end tokens are barred before
    `min_tokens` tokens.
    """

    def __init__(
        self,
        grammar: GrammarMatcher | None = None,
        bad_words: Sequence[tuple[int, ...]] = (),
        min_tokens: int = 0,
        end_ids: Collection[int] = (),
        vocab_size: int = 0,
        thinking: ThinkingLimit | None = None,
    ) -> None:
        self.grammar = grammar
        self._bad_words = bad_words
        self._longest = max(map(len, bad_words), default=1) - 1
        self._early = min_tokens if end_ids else 0
        self._end_ids = [token for token in end_ids if token < vocab_size]
        self._vocab_size = vocab_size
        self._recent: list[int] = []
        self._count = 0
        self._limit = thinking  # None once there is no thinking to come
        self._thought: int | None = 0 if thinking and thinking.begun else None  # tokens; None before it begins

    @property
    def idle(self) -> bool:
        """Whether every token is allowed, now and for the rest of the answer."""
        free = self.grammar is None and not self._bad_words and self._limit is None
        return free and self._count >= self._early

    def allow(self, token: int) -> bool:
        """Whether no constraint bars `token`; cheaper than `apply`, which may still allow a barred token if no other
        is left.
        """
        if self._forced not in (None, token) or token in self._barred():
            return False
        return self.grammar is None or self.grammar.allows(token)

    def apply(self, row: Tensor) -> Tensor:
        """The logits `row` [vocab] with every forbidden token at minus infinity."""
        if self.idle:
            return row
        whole = self.grammar is None
        allowed = torch.ones(len(row), dtype=torch.bool) if self.grammar is None else self.grammar.mask()
        forced = self._forced
        if forced is not None and bool(allowed[forced]):
            only = torch.zeros(len(row), dtype=torch.bool)
            only[forced] = True
            return row.masked_fill(to_device(~only, row.device), float("-inf"))
        barred = self._barred()
        if barred:
            rest = allowed.clone()
            rest[barred] = False
            allowed, whole = (rest, False) if bool(rest.any()) else (allowed, whole)
        return row if whole else row.masked_fill(to_device(~allowed, row.device), float("-inf"))

    def observe(self, token: int) -> None:
        """Append `token` to the answer."""
        self._count += 1
        if self._longest:
            self._recent = [*self._recent, token][-self._longest :]
        if self.grammar is not None:
            self.grammar.advance(token)
        if self._limit is not None:
            self._follow_thinking(self._limit, token)

    @property
    def _forced(self) -> int | None:
        """The end of thinking where enough was thought: no other token may come then."""
        limit = self._limit
        return limit.end if limit and self._thought is not None and self._thought >= limit.tokens else None

    def _follow_thinking(self, limit: ThinkingLimit, token: int) -> None:
        if self._thought is None:
            if token == limit.begin:
                self._thought = 0
            elif token == limit.end or self._count >= _OPENING:
                self._limit = None
        elif token == limit.end:
            self._limit = None
        else:
            self._thought += 1

    def _barred(self) -> list[int]:
        early = self._end_ids if self._count < self._early else []
        recent = tuple(self._recent)
        return [*early, *(word[-1] for word in self._bad_words if recent[len(recent) - len(word) + 1 :] == word[:-1])]
