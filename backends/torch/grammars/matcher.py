"""A grammar compiled for a model's tokens, and its state along one answer.

llguidance computes masks, advances the state and rolls it back. The state depends on the answer's tokens alone, so
that the distribution at a node of a draft tree is the one that the grammar leaves after the drafted ancestors: a draft
that violates the grammar is never accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import llguidance
import numpy as np
import torch
from torch import Tensor

from agentspec.backends.torch.grammars.worker import STACK, compiled, on_stack
from agentspec.errors import InvalidRequestError

T = TypeVar("T")
MAX_STARTS: Final = 256  # answers after which a grammar is compiled again, since what its lexer keeps only grows
RENEWAL_SECONDS: Final = 0.05  # a grammar that takes longer to compile is not compiled again between two steps


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The tokens that a grammar speaks of: `vocab_size` of the model, those that end an answer, and their texts."""

    vocab_size: int
    end_ids: tuple[int, ...]
    tokenizer: llguidance.LLTokenizer


class CompiledGrammar:
    """A compiled grammar, shared by all answers that must follow it. `param` is the request's field that asked for it.

    Its lexer is shared as well, and fails for all answers once it failed for one: the grammar is then `stale`, and
    must be compiled again.
    """

    def __init__(self, table: TokenTable, source: str, param: str) -> None:
        started = time.thread_time()
        self.table = table
        self.param = param
        self.stale = False
        self._source = source
        self._matcher = compiled(table.tokenizer, source)
        self._seconds = time.thread_time() - started
        self._starts = 0

    @property
    def worn(self) -> bool:
        """Whether it should be compiled again before the next answer."""
        return self.stale or self._starts > MAX_STARTS

    def start(self) -> GrammarMatcher:
        """The state at the start of an answer, which has no tokens yet."""
        self._starts += 1
        if self.stale:
            self._matcher, self.stale = self.renewed(), False
        return GrammarMatcher(self, self._matcher.deep_copy())

    def renewed(self) -> llguidance.LLMatcher:
        """The grammar compiled again, for nobody else yet. Raises `InvalidRequestError` if that would take long."""
        if self._seconds > RENEWAL_SECONDS:
            message = "another answer in this form went beyond the limits of its grammar; send the request again"
            raise InvalidRequestError(message, param=self.param)
        return on_stack(STACK, lambda: compiled(self.table.tokenizer, self._source))


class GrammarMatcher:
    """The grammar's state after the answer so far. Not thread-safe.

    An end token is allowed once the text satisfies the grammar, and forced when no other token is allowed. All methods
    raise `InvalidRequestError` when a step is beyond the limits of time and memory, or when no text can go on.
    """

    def __init__(self, grammar: CompiledGrammar, matcher: llguidance.LLMatcher) -> None:
        self._grammar = grammar
        self._table = table = grammar.table
        self._matcher = matcher
        self._bits = np.zeros((max(table.vocab_size, table.tokenizer.vocab_size) + 31) // 32, dtype=np.int32)
        self._forced: list[int] = []
        self._tokens: list[int] = []
        self._alone = False  # whether only this answer can have broken the lexer
        self._drafts = True

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; far cheaper than `mask`."""
        return self._try(lambda matcher: self._follows(matcher, token))

    def mask(self) -> Tensor:
        """Which tokens may come next, as bool [vocab] with at least one True."""
        self._try(lambda matcher: matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes))
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._table.vocab_size]
        if not bits.any():
            raise self._failure("no token of this model can go on with it")
        return torch.from_numpy(bits.view(np.bool_))

    def advance(self, token: int) -> None:
        """Append `token`, which must be allowed, to the answer."""
        self._forced = self._forced[1:] if self._forced[:1] == [token] else []
        if token not in self._table.end_ids:
            self._try(lambda matcher: matcher.consume_token(token))
            self._tokens.append(token)

    def forced(self) -> list[int]:
        """The tokens of the text that must follow, as the tokenizer would spell it; an end token if only the end can
        follow; empty if the grammar leaves a choice.
        """
        if not self._forced:  # else still forced: found again at every step, a long text would take quadratic time
            self._forced = self._try(self._found_forced)
        return list(self._forced)

    def admitted(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The nodes of a draft tree, ascending, that the grammar allows after their ancestors. Keeps the state.

        Nodes beyond the grammar's limits are not admitted, since the answer may never come to them.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        admitted: list[int] = []
        matcher = self._matcher.deep_copy()
        if self._drafts:
            self._visit(matcher, -1, children, tokens, admitted)
        if matcher.is_error():  # the draft broke the lexer, which is the answer's too: that may cost drafts only
            self._drafts = self._alone = False
        return sorted(admitted)

    def _visit(
        self,
        matcher: llguidance.LLMatcher,
        above: int,
        children: dict[int, list[int]],
        tokens: Sequence[int],
        admitted: list[int],
    ) -> None:
        for node in children.get(above, ()):
            token = tokens[node]
            if not (0 <= token < self._table.vocab_size and self._follows(matcher, token)):
                continue
            admitted.append(node)
            if node in children and token not in self._table.end_ids and matcher.consume_token(token):
                self._visit(matcher, node, children, tokens, admitted)
                matcher.rollback(1)

    def _follows(self, matcher: llguidance.LLMatcher, token: int) -> bool:
        if token in self._table.end_ids:
            return matcher.is_accepting()
        return not matcher.is_stopped() and matcher.validate_tokens([token]) == 1

    def _found_forced(self, matcher: llguidance.LLMatcher) -> list[int]:
        return [self._table.end_ids[-1]] if matcher.is_stopped() else list(matcher.compute_ff_tokens())

    def _try(self, step: Callable[[llguidance.LLMatcher], T]) -> T:
        """Take a step; if it fails, take it again, once an answer, with a lexer that no other answer has broken."""
        result = step(self._matcher)
        if not self._matcher.is_error():
            return result
        if not self._alone:
            self._alone = self._grammar.stale = True
            self._matcher = self._grammar.renewed()
            for token in self._tokens:
                self._matcher.consume_token(token)
            result = step(self._matcher)
        if self._matcher.is_error():
            raise self._failure(reason(self._matcher.get_error()))
        return result

    def _failure(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"the answer cannot go on in the required form: {why}", param=self._grammar.param)


def reason(error: str) -> str:
    """What llguidance's error says of the grammar, which it may quote; never the state of its parser or stack."""
    first, _, rest = error.partition("\n")
    lowered = first.lower()
    if "panic" in lowered:
        return "the compiler cannot handle this grammar; simplify it"
    if "too many" in lowered or "row has" in lowered or "fuel" in lowered or "too complex" in lowered:
        return "at one position it allows too many ways on; reduce counted repetitions and alternatives that overlap"
    if "NoExtension" in first:
        return "no text fits it from here on"
    if first.endswith("regex parse error:"):
        first += next((line.removeprefix("error:") for line in rest.split("\n") if line.startswith("error:")), "")
    return first.strip()[:300]
