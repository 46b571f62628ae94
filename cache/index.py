"""The native suffix index and drafter with Python types. This module is thin and holds no algorithm.

`tests/cache/reference.py` implements both in plain Python and explains them. Several threads may call any method at
once; the native code releases the interpreter lock.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.tokens import EMPTY, Tokens, TokensLike, as_tokens, require_budget
from agentspec.errors import CacheDamagedError, CacheError, CacheFormatError, ConfigurationError, InvalidRequestError
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

PartCounts = tuple[int, int, int, int]
"""One number for each of the four parts of a frozen index: sequences, pieces, run, log."""

ITEM_BYTES: PartCounts = (32, 12, 4, 4)
"""Bytes of one item of each part. The record of a sequence begins with the sequence's number."""


@dataclass(frozen=True, slots=True)
class Successors:
    """The distinct tokens that followed a context, in ascending order, with their counts, and the newest token."""

    tokens: NDArray[np.int32]
    counts: NDArray[np.int64]
    most_recent: int | None


@dataclass(frozen=True, slots=True)
class IndexUsage:
    """One row per sequence. `last_used` is a clock that ticks with every insert and hit."""

    sequences: NDArray[np.int64]
    lengths: NDArray[np.int64]
    hits: NDArray[np.int64]
    last_used: NDArray[np.int64]


class IndexWork(NamedTuple):
    """Tokens appended and removed since the index was made, and positions looked at, sorted or moved for it.

    `locked` while other changes waited, `longest_hold` in one go, `background` while nobody waited.
    """

    appended: int
    removed: int
    locked: int
    longest_hold: int
    background: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """A read-only copy of an index, as four arrays. `SuffixIndex.load` reads them from a file in this order.

    `sequences` and `pieces` are the bytes of fixed-size records; `run` and `log` take four bytes a token each.
    """

    sequences: NDArray[np.uint8]
    pieces: NDArray[np.uint8]
    run: NDArray[np.uint32]
    log: NDArray[np.int32]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The numbers of the sequences, in the order of their records."""
        return sequence_numbers(self.sequences)

    @property
    def counts(self) -> PartCounts:
        sizes = zip(self.parts, ITEM_BYTES, strict=True)
        return cast(PartCounts, tuple(part.nbytes // size for part, size in sizes))

    @property
    def checksums(self) -> PartCounts:
        """The checksum of each array."""
        return cast(PartCounts, tuple(checksum(part.view(np.uint8)) for part in self.parts))

    @property
    def parts(self) -> tuple[NDArray[Any], ...]:
        return self.sequences, self.pieces, self.run, self.log


def sequence_numbers(records: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The sequence numbers that sequence records hold."""
    return records.view(np.int64).reshape(-1, ITEM_BYTES[0] // 8)[:, 0].copy()


def checksum(data: bytes | NDArray[np.uint8]) -> int:
    """A 64-bit XXH64 checksum: detects damage, not deliberate forgery."""
    return _native.checksum(np.frombuffer(data, dtype=np.uint8))


# No thread may be inside the native code when the interpreter ends: one that asks for its lock then would abort the
# process. What is registered later, such as the closing of caches, is done before.
atexit.register(_native.quiesce)


class SuffixIndex:
    """Finds the tokens that followed a context in many sequences of token ids. Integers name the sequences.

    Unknown sequences raise `KeyError`; appending to a closed sequence raises `InvalidRequestError`. At most `tail`
    tokens are matched one by one, and a sorted run is at least `ratio` times as large as the next; both change the
    speed only. Drafting waits for no change. Changes take work in proportion to their tokens; larger merges follow
    before they return or, if `deferred`, when `merge_step` is called. Queries know of a change when it returns.

    `capacity` positions (at most 2^32 - 1, the default) are handed out in all: one for each token, and a few for each
    sequence. Merging takes those of removed sequences back before they run out.
    """

    def __init__(self, *, tail: int = 128, ratio: int = 8, deferred: bool = False, capacity: int = 2**32 - 1) -> None:
        self.native = _native.SuffixIndex(tail, ratio, deferred, capacity)

    @classmethod
    def load(cls, file: int, offset: int, counts: PartCounts, sums: PartCounts, deferred: bool = False) -> SuffixIndex:
        """Map a frozen index that lies in the open file descriptor `file` from byte `offset` to the file's end.

        The file must not change any more; it may be closed and deleted. Raises `CacheDamagedError` if the file is not
        as it was frozen, before more is allocated than its size allows, and `CacheError` if it cannot be mapped.
        """
        index = cls()
        try:
            index.native = _native.SuffixIndex.load(file, offset, counts, sums, deferred)
        except ValueError as error:
            raise CacheDamagedError(str(error)) from error
        except MemoryError as error:
            raise CacheError("there is no address space left to map it") from error
        return index

    def freeze(self, sequences: Sequence[int] | NDArray[np.int64]) -> Frozen:
        """Copy those `sequences` that exist, for `load`. Nobody is held up."""
        return Frozen(*self.native.freeze(np.ascontiguousarray(sequences, dtype=np.int64)))

    def append(self, sequence: int, tokens: TokensLike, context: TokensLike = EMPTY) -> None:
        """Add tokens at the end of a sequence, a new or an open one. Queries see them at once.

        `context`, for a new sequence only, holds the tokens before it: they are matched, never counted or drafted.
        """
        self.add(sequence, as_tokens(tokens), as_tokens(context, "context"))

    def add(self, sequence: int, tokens: Tokens, context: Tokens = EMPTY) -> None:
        """Like `append`, for tokens that the caller has checked."""
        try:
            self.native.append(sequence, tokens, context)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error

    def close(self, sequence: int) -> None:
        """Refuse further tokens for a sequence."""
        self._known(sequence, self.native.close)

    def truncate(self, sequence: int, length: int) -> None:
        """Delete the tokens of an open sequence from `length` on."""
        try:
            self.native.truncate(sequence, length)
        except IndexError:
            raise KeyError(sequence) from None
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
        """The last `DEPTH` tokens of a sequence's context."""
        return self._known(sequence, self.native.prefix)

    def length(self, sequence: int) -> int:
        return self._known(sequence, self.native.length)

    def common_prefix(self, sequence: int, tokens: TokensLike) -> int:
        """Number of leading tokens that the sequence shares with `tokens`: an int32 array is taken as it is."""
        flat = isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1
        array = cast(Tokens, tokens) if flat and cast(Tokens, tokens).flags.c_contiguous else as_tokens(tokens)
        return self._known(sequence, lambda known: self.native.common_prefix(known, array))

    def count(self, context: TokensLike) -> int:
        """How often the last `DEPTH` tokens of a non-empty context occurred with a token after them."""
        return self.native.count(_context(context))

    def successors(self, context: TokensLike) -> Successors:
        """The tokens that followed the last `DEPTH` tokens of a non-empty context."""
        tokens, counts, most_recent = self.native.successors(_context(context))
        return Successors(tokens, counts, most_recent if most_recent >= 0 else None)

    def usage(self) -> IndexUsage:
        return IndexUsage(*self.native.usage())

    def oldest(self, tokens: int) -> NDArray[np.int64]:
        """The least recently used sequences, that one first, that together hold `tokens` tokens or more; else all."""
        return self.native.oldest(tokens)

    def work(self) -> IndexWork:
        return IndexWork(*self.native.work())

    @property
    def sequence_count(self) -> int:
        return self.native.sequence_count

    @property
    def token_count(self) -> int:
        return self.native.token_count

    def memory_bytes(self) -> int:
        """Bytes that the index holds, a mapped file and copies made for a merge included. Constant time."""
        return self.native.memory_bytes()

    def transient_bytes(self) -> int:
        """Bytes taken in addition while a log with much deleted text is written anew. Constant time."""
        return self.native.transient_bytes()

    def reclaimable_bytes(self) -> int:
        """Bytes of deleted text among them, which merging gives back. Constant time."""
        return self.native.reclaimable_bytes()

    def mapped_bytes(self) -> int:
        """Bytes of the index that are pages of a mapped file."""
        return self.native.mapped_bytes()

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
    """

    def __init__(self, *, scan_limit: int = 64) -> None:
        self.native = _native.Drafter(scan_limit)

    def draft(
        self,
        indexes: Sequence[Sourced],
        context: TokensLike,
        max_tokens: int = 32,
        min_probability: float = 0.0,
        *,
        chain: bool = False,
    ) -> Draft:
        """A tree that continues `context`, likeliest paths first; at equal match length an earlier index goes first.

        A `chain` has no branches, for targets that verify no trees: each node is the likeliest child of the last.
        Raises `InvalidRequestError` for a bad budget, an index given twice or an unknown source.
        """
        require_budget(max_tokens, min_probability)
        return self.propose(indexes, as_tokens(context, "context"), max_tokens, min_probability, chain)

    def propose(
        self,
        indexes: Sequence[Sourced],
        context: Tokens,
        max_tokens: int,
        min_probability: float,
        chain: bool = False,
    ) -> Draft:
        """Like `draft`, for a context and a budget that the caller has checked."""
        try:
            tree = self.native.draft(_natives(indexes), context, max_tokens, min_probability, chain)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        return Draft(*tree)

    def observe(self, indexes: Sequence[Sourced], context: TokensLike, tokens: TokensLike) -> None:
        """Learn that `tokens` followed `context`. Call before adding the tokens to any index."""
        self.learn(indexes, as_tokens(context, "context"), as_tokens(tokens))

    def learn(self, indexes: Sequence[Sourced], context: Tokens, tokens: Tokens) -> None:
        """Like `observe`, for tokens that the caller has checked."""
        try:
            self.native.observe(_natives(indexes), context, tokens)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error

    def observe_end(self, token: int) -> None:
        """Learn that an output ended with `token`, so that fewer tokens are drafted after it."""
        self.native.observe_end(int(as_tokens([token], "token")[0]))

    def state(self) -> NDArray[np.float64]:
        """The learned state, as plain numbers for `restore`."""
        return self.native.state()

    def restore(self, state: NDArray[np.float64]) -> None:
        """Load a learned state. Raises `CacheFormatError` unless this version wrote it."""
        try:
            self.native.restore(np.asarray(state, dtype=np.float64).reshape(-1))
        except ValueError as error:
            raise CacheFormatError(str(error)) from error

    @property
    def version(self) -> int:  # grows with every change of the learned state
        return self.native.version

    def memory_bytes(self) -> int:
        """Bytes that the drafter holds: the tables it starts with are shared by all. Constant time."""
        return self.native.memory_bytes()


DraftJob = tuple[IndexDrafter, Sequence[Sourced], Tokens, int, float, bool]
"""A drafter and the arguments of `IndexDrafter.propose`."""


def propose_batch(jobs: Sequence[DraftJob], patience: float | None = None) -> list[Draft]:
    """Draft for all jobs in one call, over several threads where there is enough to do.

    A draft that is not complete after `patience` seconds is what there is of it then: its likeliest part.
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


def _context(context: TokensLike) -> Tokens:
    array = as_tokens(context, "context")
    if array.size == 0:
        raise InvalidRequestError("a context needs at least one token", param="context")
    return array
