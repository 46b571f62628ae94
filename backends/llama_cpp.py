"""llama.cpp's static lookup file: which tokens followed each pair of tokens, and how often (docs/backends.md)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.record import SequenceRecord
from agentspec.cache.storage.export import replacing

Int32s = NDArray[np.int32]

_KEY = 4  # int32 in a key; those beyond the pair are -1
_PAIR = 2
_AT_ONCE = 4 << 20  # tokens that are counted together
_MOST_COUNT = (2**31 - 1) // 100  # llama.cpp computes 100 times a count in 32 bits


def write_lookup(path: Path, rows: Iterable[SequenceRecord]) -> tuple[int, int]:
    """Write what followed each pair of tokens in the sequences; returns (pairs, sequences).

    The file is readable by its owner only, and written whole or not at all. Raises `ConfigurationError` if it cannot
    be written, and passes on what `rows` raises.
    """
    table, waiting, size, sequences = _table([]), [], 0, 0
    for row in rows:
        sequences += 1
        text = np.concatenate((row.context[-_PAIR:], row.tokens)).astype(np.int32)
        waiting.append(_triples(text))
        size += len(text)
        if size > _AT_ONCE:
            table, waiting, size = _table([table, *waiting]), [], 0
    table = _table([table, *waiting])
    with replacing(path) as file:
        data, pairs = _encoded(table)
        file.write(data)
    return pairs, sequences


def _triples(text: Int32s) -> NDArray[np.int64]:
    """Rows of two tokens, the token after them, and a count of 1."""
    if len(text) <= _PAIR:
        return np.zeros((0, 4), np.int64)
    return np.stack((text[:-2], text[1:-1], text[2:], np.ones(len(text) - 2, np.int32)), axis=1).astype(np.int64)


def _table(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The rows of all parts in order, with the counts of equal triples added up."""
    rows = np.concatenate([np.zeros((0, 4), np.int64), *parts])
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    first = _begins(rows[:, :3])
    if not len(first):
        return rows
    table = rows[first]
    table[:, 3] = np.add.reduceat(rows[:, 3], first)
    return table


def _begins(rows: NDArray[np.int64]) -> NDArray[np.intp]:
    """Where a row differs from the one before."""
    return np.flatnonzero(np.concatenate((np.ones(min(1, len(rows)), bool), (rows[1:] != rows[:-1]).any(axis=1))))


def _encoded(table: NDArray[np.int64]) -> tuple[bytes, int]:
    """The file's content, for each pair: the key, how many tokens followed, and each of them with its count."""
    pairs = _begins(table[:, :_PAIR])
    sizes = np.diff(np.append(pairs, len(table)))
    owner = np.repeat(np.arange(len(pairs)), sizes)
    out = np.full((_KEY + 1) * len(pairs) + 2 * len(table), -1, dtype="<i4")
    heads = (_KEY + 1) * np.arange(len(pairs)) + 2 * pairs
    items = (_KEY + 1) * (owner + 1) + 2 * np.arange(len(table))
    out[heads], out[heads + 1], out[heads + _KEY] = table[pairs, 0], table[pairs, 1], sizes
    out[items], out[items + 1] = table[:, 2], np.minimum(table[:, 3], _MOST_COUNT)
    return out.tobytes(), len(pairs)
