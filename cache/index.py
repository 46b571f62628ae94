"""The native suffix index and drafter with Python types. This module is thin and holds no algorithm.

`tests/cache/reference.py` implements both in plain Python and explains them. Several threads may call any method at
once; the native code releases the interpreter lock. Arrays of tokens are as `as_tokens` returns them.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.tokens import EMPTY, Tokens
from agentspec.errors import CacheFormatError, ConfigurationError, InvalidRequestError
from agentspec.types import Draft

T = TypeVar("T")


class NativeExtensionError(ConfigurationError, ImportError):
    """The native extension is not built for this interpreter."""


try:
    from agentspec.cache import _native
except ImportError as error:
    raise NativeExtensionError(f"agentspec's native extension is missing: run `pip install -e .` ({error})") from error

DEPTH = 64
"""At most this many tokens of a context are matched."""

# No thread may be inside the native code when the interpreter ends: one that asks for its lock then would abort the
# process. What is registered later, such as the closing of caches, is done before.
atexit.register(_native.quiesce)


class SuffixIndex:
    """Finds the tokens that followed a context in many sequences of token ids. Integers name the sequences.

    Unknown sequences raise `KeyError`, and a closed one refuses changes with `InvalidRequestError`. At most `tail`
    tokens are matched one by one, and a sorted run is at least `ratio` times as large as the next; both change the
    speed only. Drafting waits for no change. Changes take work in proportion to their tokens; larger merges follow
    before they return or, if `deferred`, when `merge_step` is called. Queries know of a change when it returns.

    `capacity` positions (at most 2^32 - 1, the default) are handed out in all: one for each token, and a few for each
    sequence. Merging takes those of removed sequences back before they run out.
    """

    def __init__(self, *, tail: int = 128, ratio: int = 8, deferred: bool = False, capacity: int = 2**32 - 1) -> None:
        self.native = _native.SuffixIndex(tail, ratio, deferred, capacity)

    def append(self, sequence: int, tokens: Tokens, context: Tokens = EMPTY) -> None:
        """Add tokens at the end of a sequence, a new or an open one. Queries see them at once.

        `context`, for a new sequence only, holds the tokens before it: they are matched, never counted or drafted.
        """
        try:
            self.native.append(sequence, tokens, context)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error

    def close(self, sequence: int) -> None:
        self._known(sequence, self.native.close)

    def truncate(self, sequence: int, length: int) -> None:
        """Delete the tokens of an open sequence from `length` on."""
        try:
            self._known(sequence, lambda known: self.native.truncate(known, length))
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error

    def remove(self, sequences: Sequence[int] | NDArray[np.int64]) -> None:
        """Delete sequences. Unknown ones are ignored. Merging gives their memory back; no later query knows them."""
        self.native.remove(np.ascontiguousarray(sequences, dtype=np.int64))

    def merge_step(self) -> bool:
        """Do a piece of what a `deferred` index put off. False if none is left, others are at it, or still read it."""
        return self.native.merge_step()

    @property
    def merging_due(self) -> bool:
        """Whether `merge_step` has something to do. Constant time."""
        return self.native.merging_due

    def tokens(self, sequence: int) -> Tokens:
        return self._known(sequence, self.native.tokens)

    def prefix(self, sequence: int) -> Tokens:
        return self._known(sequence, self.native.prefix)

    def length(self, sequence: int) -> int:
        return self._known(sequence, self.native.length)

    def common_prefix(self, sequence: int, tokens: Tokens) -> int:
        """Number of leading tokens that the sequence shares with `tokens`."""
        return self._known(sequence, lambda known: self.native.common_prefix(known, tokens))

    def oldest(self, tokens: int) -> NDArray[np.int64]:
        """The least recently used sequences, that one first, that together hold `tokens` tokens or more; else all."""
        return self.native.oldest(tokens)

    @property
    def sequence_count(self) -> int:
        return self.native.sequence_count

    @property
    def token_count(self) -> int:
        return self.native.token_count

    def memory_bytes(self) -> int:
        """Bytes that the index holds, a mapped file and copies made for a merge included. Constant time."""
        return self.native.memory_bytes()

    def reclaimable_bytes(self) -> int:
        """Bytes of deleted text among them, which merging gives back. Constant time."""
        return self.native.reclaimable_bytes()

    def mapped_bytes(self) -> int:
        """Bytes of the index that are pages of a mapped file."""
        return self.native.mapped_bytes()

    def freeze(self, sequences: Sequence[int]) -> tuple[NDArray[Any], ...]:
        """Copies of the parts of an index with those `sequences` that exist, for a segment. No thread waits for it."""
        return self.native.freeze(np.ascontiguousarray(sequences, dtype=np.int64))

    def check_integrity(self) -> None:
        """Raise `CacheFormatError`, naming the fault, when an invariant does not hold. Linear in the index."""
        try:
            self.native.check_integrity()
        except RuntimeError as error:
            raise CacheFormatError(str(error)) from error

    @staticmethod
    def _known(sequence: int, call: Callable[[int], T]) -> T:
        try:
            return call(sequence)
        except IndexError:
            raise KeyError(sequence) from None


Sourced = tuple[SuffixIndex, int]
"""An index, and the `Source` that drafts report for its tokens."""


class IndexDrafter:
    """Makes calibrated draft trees from matches of all lengths and indexes, and learns how reliable each kind is.

    If a sorted run holds more than `scan_limit` new matches, the drafter looks at an even sample of them.
    `propose_batch` makes the drafts.
    """

    def __init__(self, *, scan_limit: int = 64) -> None:
        self.native = _native.Drafter(scan_limit)

    def observe(self, indexes: Sequence[Sourced], context: Tokens, tokens: Tokens) -> None:
        """Learn that `tokens` followed `context`. Call before adding the tokens to any index."""
        try:
            self.native.observe(_natives(indexes), context, tokens)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error

    def observe_end(self, token: int) -> None:
        """Learn that an output ended with `token`, so that fewer tokens are drafted after it."""
        self.native.observe_end(token)

    def state(self) -> NDArray[np.float64]:
        """The learned state, as plain numbers for `restore`."""
        return self.native.state()

    def restore(self, state: NDArray[np.float64]) -> None:
        """Load a learned state. Raises `CacheFormatError` unless this version wrote it."""
        try:
            self.native.restore(state)
        except ValueError as error:
            raise CacheFormatError(str(error)) from error

    def memory_bytes(self) -> int:
        """Bytes that the drafter holds: the tables it starts with are shared by all. Constant time."""
        return self.native.memory_bytes()


DraftJob = tuple[IndexDrafter, Sequence[Sourced], Tokens, int, float, bool]
"""A drafter, the indexes and the context that it drafts from, most tokens, least probability, and whether the draft is
a chain: no branches, each node the likeliest child of the last, for targets that verify no trees."""


def propose_batch(jobs: Sequence[DraftJob], patience: float | None = None) -> list[Draft]:
    """Draft for all jobs in one call, over several threads where there is enough to do.

    A draft is a tree that continues the context, likeliest paths first; at equal match length an earlier index goes
    first. One that is not complete after `patience` seconds is what there is of it then: its likeliest part. Raises
    `InvalidRequestError` for an index given twice or an unknown source.
    """
    patience = None if patience is None else min(patience, 1e6)  # the native clock knows no infinity
    native = [
        (drafter.native, _natives(indexes), context, max_tokens, min_probability, chain)
        for drafter, indexes, context, max_tokens, min_probability, chain in jobs
    ]
    try:
        return [Draft(*tree) for tree in _native.draft_batch(native, patience)]
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


def _natives(indexes: Sequence[Sourced]) -> list[tuple[_native.SuffixIndex, int]]:
    return [(index.native, source) for index, source in indexes]


# Chains, for targets that verify no trees: `allocate_budget` in `speculation/governor.py` says in plain Python how much
# of each a step verifies.

Chain = _native.Chain
"""One request's chain. `advance` follows further tokens, `replace` sets what follows, with the probability that all
tokens up to each are accepted; `drafted`, `accepted` and `expected` tell of the chain proposed last. One thread at a
time may use it."""


class ChainTurn(NamedTuple):
    """A chain's part in a step: at most `limit` tokens, accepted `factor` times as often as the chain says.

    The request must gain `required` tokens, as in `allocate_budget`.
    With `drafter`, what follows `context` is searched for in `indexes`; without, the chain goes on as it is.
    """

    chain: Chain
    drafter: IndexDrafter | None
    indexes: Sequence[Sourced]
    context: Tokens
    limit: int
    factor: float
    required: float = 0.0


class StepCurve(NamedTuple):
    """Seconds of a step by its tokens: straight lines between these points, level beyond them."""

    tokens: NDArray[np.float64]
    seconds: NDArray[np.float64]


def propose_chains(
    turns: Sequence[ChainTurn],
    cost: StepCurve,
    *,
    floor: float = 0.0,
    vocabulary: int = 2**31 - 1,
    patience: float | None = None,
) -> list[list[int]]:
    """Search, choose and propose for all requests of a step in one call; returns the proposed tokens of each.

    What requests require is served first; then the chains are cut together where the expected tokens per second are
    highest. No chain holds a token that is not below `vocabulary`, or that is less likely than `floor`: for a request
    that requires more than one token, which has to pay for that request alone, than `floor / len(turns)`. What is not
    found after `patience` seconds is left out; a chain of which more was known before goes on as it is then.
    """
    patience = None if patience is None else min(patience, 1e6)  # the native clock knows no infinity
    native = [
        (
            chain,
            None if drafter is None else drafter.native,
            [(index.native, source) for index, source in indexes],
            context[-DEPTH:],
            limit,
            factor,
            required,
        )
        for chain, drafter, indexes, context, limit, factor, required in turns
    ]
    try:
        return _native.propose_chains(native, len(turns), cost.tokens, cost.seconds, floor, vocabulary, patience)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
