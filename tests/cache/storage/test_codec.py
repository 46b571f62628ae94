from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache.storage import codec
from agentspec.cache.tokens import SequenceRecord
from agentspec.errors import CacheFormatError
from agentspec.types import Namespace

tokens = st.lists(st.integers(0, 2**31 - 2), max_size=80).map(lambda ids: np.array(ids, dtype=np.int32))


def record(row: SequenceRecord, **changes: Any) -> Any:
    return SimpleNamespace(**codec.encode(row) | {"id": 7} | changes)


@given(tokens, tokens)
def test_what_is_read_is_what_was_recorded(output: np.ndarray, context: np.ndarray) -> None:
    row = SequenceRecord(1 << 40, Namespace("t", "m", "k", "c"), "s", output, context, 12.5)
    found = codec.decode(record(row))
    assert (found.tokens.tolist(), found.context.tolist()) == (output.tolist(), context.tolist())
    assert (found.sequence, found.namespace, found.session, found.created_at) == (
        row.sequence,
        row.namespace,
        row.session,
        row.created_at,
    )
    assert len(record(row).tokens) == record(row).size


def test_every_flipped_bit_of_the_tokens_is_told() -> None:
    tokens = np.arange(100, 300, dtype=np.int32)
    row = SequenceRecord(1, Namespace("t"), None, tokens, tokens[:60], 0.0)
    packed = codec.encode(row)["tokens"]
    assert isinstance(packed, bytes)
    for bit in range(8 * len(packed)):
        data = bytearray(packed)
        data[bit // 8] ^= 1 << bit % 8
        try:
            found = codec.decode(record(row, tokens=bytes(data)))
        except CacheFormatError:
            continue
        assert (found.tokens == tokens).all() and (found.context == tokens[:60]).all()  # bits that mean nothing
