"""The native suffix index and drafter with Python types. Thin: no algorithm lives here.

`cache/reference.py` does the same in plain Python and explains what is computed. Every method may be called from
several threads at once; the interpreter lock is released meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.tokens import EMPTY, Tokens, TokensLike, as_tokens
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
"""Contexts count up to this many tokens."""

PartCounts = tuple[int, int, int, int]
"""A number for each part of a frozen index."""

ITEM_BYTES: PartCounts = (32, 12, 4, 4)
"""Of one item of each part. That of a sequence begins with its number."""

_SCAN_LIMIT = 64


@dataclass(frozen=True, slots=True)
class Successors:
    """What followed a context: distinct tokens in ascending order with their counts, and the newest of all."""

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


@dataclass(frozen=True, slots=True)
class Frozen:
    """An index at rest, as the arrays that `SuffixIndex.load` finds in a file one behind the other.

    `sequences` and `pieces` are the bytes of fixed-size records, `run` and `log` four bytes a token each.
    """

    sequences: NDArray[np.uint8]
    pieces: NDArray[np.uint8]
    run: NDArray[np.uint32]
    log: NDArray[np.int32]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The sequences, in the order of their records."""
        return sequence_numbers(self.sequences)

    @property
    def counts(self) -> PartCounts:
        sizes = zip(self.parts, ITEM_BYTES, strict=True)
        return cast(PartCounts, tuple(part.nbytes // size for part, size in sizes))

    @property
    def checksums(self) -> PartCounts:
        """One for each array."""
        return cast(PartCounts, tuple(checksum(part.view(np.uint8)) for part in self.parts))

    @property
    def parts(self) -> tuple[NDArray[Any], ...]:
        return self.sequences, self.pieces, self.run, self.log


def sequence_numbers(records: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The numbers in the records of sequences."""
    return records.view(np.int64).reshape(-1, ITEM_BYTES[0] // 8)[:, 0].copy()


def checksum(data: bytes | NDArray[np.uint8]) -> int:
    """64 bits that differ when the data do, except where collisions are made on purpose."""
    return _native.checksum(np.frombuffer(data, dtype=np.uint8))


class SuffixIndex:
    """Which tokens followed a context, over many sequences of token ids named by integers.

    Unknown sequences raise `KeyError`, appending to a closed one `InvalidRequestError`. At most `tail` tokens are
    matched one by one and a sorted run is at least `ratio` times as large as the next; answers depend on neither.
    """

    def __init__(self, *, tail: int = 128, ratio: int = 8) -> None:
        self.native = _native.SuffixIndex(tail, ratio)

    @classmethod
    def load(cls, file: int, offset: int, counts: PartCounts, checksums: PartCounts) -> SuffixIndex:
        """A frozen index, used where it lies: from byte `offset` to the end of the open file of that descriptor.

        The file must not change any more; it may be closed and deleted. Raises `CacheDamagedError` where it is not
        as it was frozen, before more is allocated than its size allows; `CacheError` where it cannot be mapped.
        """
        index = cls()
        try:
            index.native = _native.SuffixIndex.load(file, offset, counts, checksums)
        except ValueError as error:
            raise CacheDamagedError(str(error)) from error
        except MemoryError as error:
            raise CacheError("there is no address space left to map it") from error
        return index

    def freeze(self, sequences: Sequence[int] | NDArray[np.int64]) -> Frozen:
        """Those of the sequences that exist, for `load`. Others append meanwhile; drafting is not held up at all."""
        return Frozen(*self.native.freeze(np.ascontiguousarray(sequences, dtype=np.int64)))

    def append(self, sequence: int, tokens: TokensLike, context: TokensLike = EMPTY) -> None:
        """Add tokens at the end of a sequence; visible to queries at once. A new sequence is opened.

        `context`, for a new sequence only, is what stood before it: it is matched, and never counted or drafted.
        """
        try:
            self.native.append(sequence, as_tokens(tokens), as_tokens(context, "context"))
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error

    def close(self, sequence: int) -> None:
        """Refuse further tokens for a sequence."""
        self._known(sequence, self.native.close)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens of an open sequence from `length` on."""
        try:
            self.native.truncate(sequence, length)
        except IndexError:
            raise KeyError(sequence) from None
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error

    def remove(self, sequences: Sequence[int] | NDArray[np.int64]) -> None:
        """Forget sequences in one pass over the index. Unknown ones are ignored."""
        self.native.remove(np.ascontiguousarray(sequences, dtype=np.int64))

    def tokens(self, sequence: int) -> Tokens:
        return self._known(sequence, self.native.tokens)

    def prefix(self, sequence: int) -> Tokens:
        """What stood before a sequence: the last `DEPTH` tokens of its context."""
        return self._known(sequence, self.native.prefix)

    def length(self, sequence: int) -> int:
        return self._known(sequence, self.native.length)

    def common_prefix(self, sequence: int, tokens: TokensLike) -> int:
        """Number of leading tokens that the sequence shares with `tokens`.

        Called with one prompt for many sessions, so an int32 array is taken as it is.
        """
        ready = isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.flags.c_contiguous
        array = cast(Tokens, tokens) if ready else as_tokens(tokens)
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

    @property
    def sequence_count(self) -> int:
        return self.native.sequence_count

    @property
    def token_count(self) -> int:
        return self.native.token_count

    def memory_bytes(self) -> int:
        """Bytes held, by the capacity of every part, a mapped file included. Constant time."""
        return self.native.memory_bytes()

    def mapped_bytes(self) -> int:
        """Those that are pages of a mapped file, but for what was written to since."""
        return self.native.mapped_bytes()

    def check_integrity(self) -> None:
        """Raise `CacheFormatError` saying what is wrong when an invariant does not hold. Linear in the index."""
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
"""An index and the `Source` its tokens go by."""


class IndexDrafter:
    """Blends match lengths and indexes into calibrated draft trees, and learns how far to trust each.

    Of more than `scan_limit` new matches in one sorted run an even sample is looked at.
    """

    def __init__(self, *, scan_limit: int = _SCAN_LIMIT) -> None:
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
        """A tree continuing `context`, most likely paths first; at equal match length an earlier index goes first.

        A `chain` has no branches: each node is the likeliest child of the one before, for targets that verify no trees.
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
        """`draft` without checks, for a context and a budget that are known to be good."""
        try:
            tree = self.native.draft(_natives(indexes), context[-DEPTH:], max_tokens, min_probability, chain)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        return Draft(*tree)

    def observe(self, indexes: Sequence[Sourced], context: TokensLike, tokens: TokensLike) -> None:
        """Learn from `tokens`, which turned out to follow `context`. Call before adding them to any index."""
        try:
            self.native.observe(_natives(indexes), as_tokens(context, "context")[-DEPTH:], as_tokens(tokens))
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error

    def observe_end(self, token: int) -> None:
        """Learn that an output ended with `token`: less is then drafted behind it."""
        self.native.observe_end(token)

    def state(self) -> NDArray[np.float64]:
        """What was learned, as plain numbers for `restore`."""
        return self.native.state()

    def restore(self, state: NDArray[np.float64]) -> None:
        """Take over a learned state. Raises `CacheFormatError` where it is not one of this version."""
        try:
            self.native.restore(np.ascontiguousarray(state, dtype=np.float64))
        except ValueError as error:
            raise CacheFormatError(str(error)) from error


DraftJob = tuple[IndexDrafter, Sequence[Sourced], Tokens, int, float, bool]
"""A drafter and the arguments of `IndexDrafter.propose`."""


def propose_batch(jobs: Sequence[DraftJob], patience: float | None = None) -> list[Draft]:
    """What each job's drafter proposes, all in one call and over several threads where there is enough to do.

    An index that cannot be read within `patience` seconds, because others evict or forget, is left out.
    """
    native = [(job[0].native, _natives(job[1]), job[2][-DEPTH:], *job[3:]) for job in jobs]
    try:
        return [Draft(*tree) for tree in _native.draft_batch(native, patience)]
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


def require_budget(max_tokens: int, min_probability: float) -> None:
    """Raise `InvalidRequestError` unless `max_tokens` >= 0 and 0 <= `min_probability` <= 1."""
    if type(max_tokens) is int and max_tokens >= 0 and type(min_probability) is float and 0.0 <= min_probability <= 1.0:
        return  # the usual case, at a tenth of the time
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int | np.integer) or max_tokens < 0:
        raise InvalidRequestError(f"max_tokens must be an integer, 0 or more, not {max_tokens!r}", param="max_tokens")
    if not isinstance(min_probability, int | float | np.floating) or not 0.0 <= min_probability <= 1.0:
        raise InvalidRequestError(
            f"min_probability must lie between 0 and 1, not {min_probability!r}", param="min_probability"
        )


def _natives(indexes: Sequence[Sourced]) -> list[tuple[_native.SuffixIndex, int]]:
    return [(index.native, source) for index, source in indexes]


def _context(context: TokensLike) -> Tokens:
    array = as_tokens(context, "context")
    if array.size == 0:
        raise InvalidRequestError("a context needs at least one token", param="context")
    return array
