"""A grammar compiled for a model's tokens, and its state along one answer.

llguidance computes masks, advances the state and rolls it back. The state depends on the answer's tokens alone, so
that the distribution at a node of a draft tree is the one that the grammar leaves after the drafted ancestors: a draft
that violates the grammar is never accepted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import llguidance
import numpy as np
import torch
from torch import Tensor

from agentspec.backends.torch.grammars.worker import (
    FEW_STATES,
    MOST_STATES,
    STACK,
    STATE_BYTES,
    STEP_SECONDS,
    TRIED_TOKENS,
    compiled,
    on_stack,
)
from agentspec.errors import InvalidRequestError, OverloadedError

T = TypeVar("T")
MAX_STARTS: Final = 256  # answers after which a grammar is compiled again, since what its lexer keeps only grows
RENEWAL_SECONDS: Final = 0.05  # a grammar that takes longer to compile is not compiled again between two steps
AGAIN_SECONDS: Final = 5.0  # until such a grammar is compiled for the next request, for Retry-After
_FILLED_UP: Final = "too many states"  # what answers left in their lexer together, not what one of them did


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The tokens that a grammar speaks of: `vocab_size` of the model, those that end an answer, and their texts."""

    vocab_size: int
    end_ids: tuple[int, ...]
    tokenizer: llguidance.LLTokenizer


@dataclass(slots=True, eq=False)
class SharedLexer:
    """A grammar at the start of an answer. The answers begun from it share its lexer, which grows up to `states`, and
    fails for all of them once it failed for one: it is then `broken`.
    """

    matcher: llguidance.LLMatcher
    states: int = MOST_STATES
    broken: bool = False

    def fails(self) -> bool:
        """Whether the lexer failed; else an answer's error is its own."""
        fresh = self.matcher.deep_copy()
        fresh.compute_bitmask()
        return bool(fresh.is_error())


class CompiledGrammar:
    """A compiled grammar, shared by all answers that must follow it. `param` is the request's field that asked for it,
    `size` the bytes it takes before any answer.

    When an answer breaks the lexer of a grammar that is compiled quickly, it is compiled again and the others go on; of
    one that is not, they end with `OverloadedError`. The first lexer of a `small` grammar that is compiled quickly has
    few states, so that ever new forms take little memory; those that replace it have many.
    """

    def __init__(self, table: TokenTable, source: str, param: str, *, size: int = 0, small: bool = True) -> None:
        started = time.thread_time()
        self.table = table
        self.param = param
        self._source = source
        self._size = size
        self._lexer = self._small() if small else self._compiled()
        self._starts = 0
        self._lock = threading.Lock()
        self.quick = time.thread_time() - started <= RENEWAL_SECONDS
        if not self.quick and self._lexer.states < MOST_STATES:  # nothing replaces it in time
            self._lexer = self._compiled()

    @property
    def nbytes(self) -> int:
        """The most bytes that it takes, with all that its lexer may learn from answers."""
        return self._size + self._lexer.states * STATE_BYTES

    @property
    def worn(self) -> bool:
        """Whether it should be compiled again before the next answer."""
        return self._starts > MAX_STARTS or (self._lexer.broken and not self.quick)

    def start(self) -> GrammarMatcher:
        """The state at the start of an answer. Raises `OverloadedError` as `sound_lexer` does."""
        self._starts += 1
        return GrammarMatcher(self, self.sound_lexer())

    def sound_lexer(self) -> SharedLexer:
        """The lexer that answers share now. Raises `OverloadedError` if it is broken and takes long to compile again,
        which the next request with this grammar then does.
        """
        with self._lock:
            if self._lexer.broken:
                if not self.quick:
                    message = (
                        "another answer in this form went beyond the limits of its grammar; send the request again"
                    )
                    raise OverloadedError(message, retry_after=AGAIN_SECONDS)
                self._lexer = self._compiled_again()
            return self._lexer

    def own_lexer(self) -> SharedLexer | None:
        """A lexer for one answer alone; None if it would take long to compile one."""
        return self._compiled_again() if self.quick else None

    def _compiled(self, states: int = MOST_STATES) -> SharedLexer:
        return SharedLexer(compiled(self.table.tokenizer, self._source, states), states)

    def _small(self) -> SharedLexer:
        """With few states, unless more are needed before the first token."""
        try:
            lexer = self._compiled(FEW_STATES)
        except ValueError as error:
            if _FILLED_UP not in str(error):
                raise
        else:
            if not lexer.fails():
                return lexer
        return self._compiled()

    def _compiled_again(self) -> SharedLexer:
        return on_stack(STACK, self._compiled)


class GrammarMatcher:
    """The grammar's state after the answer so far. Not thread-safe.

    An end token is allowed once the text satisfies the grammar, and forced when no other token is allowed. All methods
    raise `InvalidRequestError` when a step is beyond the limits of time and memory, or when no text can go on, and
    `OverloadedError` when another answer broke a lexer that takes long to compile again.
    """

    def __init__(self, grammar: CompiledGrammar, lexer: SharedLexer) -> None:
        self._grammar = grammar
        self._table = table = grammar.table
        self._lexer = lexer
        self._matcher = lexer.matcher.deep_copy()
        self._bits = np.zeros((max(table.vocab_size, table.tokenizer.vocab_size) + 31) // 32, dtype=np.int32)
        self._forced: list[int] = []
        self._tokens: list[int] = []
        self._broke_one = False  # whether a step of this answer broke a lexer
        self._drafts = True
        self._masks, self._seconds = 0, 0.0  # of this thread, for the masks of late

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; far cheaper than `mask`."""
        return self._try(lambda matcher: self._follows(matcher, token))

    def mask(self) -> Tensor:
        """Which tokens may come next, as bool [vocab] with at least one True."""
        started = time.thread_time()
        self._try(lambda matcher: matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes))
        self._took(time.thread_time() - started)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._table.vocab_size]
        if not bits.any():
            raise self._failure("no token of this model can go on with it")
        return torch.from_numpy(bits.view(np.bool_))

    def _took(self, seconds: float) -> None:
        """Count a mask. Raises the error with which the answer ends if masks take so long that others wait for it."""
        self._masks, self._seconds = self._masks + 1, self._seconds + seconds
        if self._masks < TRIED_TOKENS:
            return
        each, self._masks, self._seconds = self._seconds / self._masks, 0, 0.0
        if each > STEP_SECONDS:
            why = f"each of its tokens takes {each * 1000:.0f} ms; reduce alternatives that overlap"
            raise self._failure(why)

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
        if not self._drafts or self._lexer.broken:
            return admitted
        matcher = self._matcher.deep_copy()
        self._visit(matcher, -1, children, tokens, admitted)
        if matcher.is_error():  # that may cost drafts only, even if the lexer is broken, which is the answer's too
            self._drafts, self._lexer.broken = False, self._lexer.fails()
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
        """Take a step. If it fails because of the lexer, take it again with another one: with the one that answers
        share now if another answer broke it, and else with one of its own, so that what fails then is this answer's.
        """
        result = step(self._matcher)
        while self._matcher.is_error():
            self._move(self._matcher.get_error())
            result = step(self._matcher)
        return result

    def _move(self, error: str) -> None:
        """Go on with another lexer after `error`. Raises the error with which the answer ends if there is none."""
        lexer = None
        if not self._lexer.broken:
            self._lexer.broken = self._lexer.fails()
            if self._broke_one or not self._lexer.broken:
                raise self._failure(reason(error))
            self._broke_one = True
            lexer = self._grammar.own_lexer()
            if lexer is None and _FILLED_UP not in error:
                raise self._failure(reason(error))
        self._lexer = lexer or self._grammar.sound_lexer()
        self._matcher = self._lexer.matcher.deep_copy()
        for token in self._tokens:
            if not self._matcher.consume_token(token):
                break

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
