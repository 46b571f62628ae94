from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache.record import SequenceRecord
from agentspec.cache.storage import codec
from agentspec.errors import CacheFormatError
from agentspec.types import Labels, Namespace

tokens = st.lists(st.integers(0, 2**31 - 2), max_size=80).map(lambda ids: np.array(ids, dtype=np.int32))


def record(row: SequenceRecord, **changes: Any) -> Any:
    return SimpleNamespace(**codec.encode(row) | {"id": 7} | changes)


@given(tokens, tokens)
def test_what_is_read_is_what_was_recorded(output: np.ndarray, context: np.ndarray) -> None:
    row = SequenceRecord(1 << 40, Namespace("t", "m", "k", "c"), Labels("s", None, "p"), output, context, 12.5)
    found = codec.decode(record(row), "db")
    assert (found.tokens.tolist(), found.context.tolist()) == (output.tolist(), context.tolist())
    assert (found.sequence, found.namespace, found.labels, found.created_at) == (
        row.sequence,
        row.namespace,
        row.labels,
        row.created_at,
    )
    assert len(record(row).tokens) == record(row).size


@pytest.mark.parametrize("changes", [{"tokens": b"x"}, {"tokens": b""}, {"token_count": 4}])
def test_damage_names_the_database_and_the_row(changes: dict[str, object]) -> None:
    row = SequenceRecord(1, Namespace("t"), Labels(), np.array([1, 2], np.int32), np.array([3], np.int32), 0.0)
    with pytest.raises(CacheFormatError, match=r"the-db is damaged.*sequence 7"):
        codec.decode(record(row, **changes), "the-db")
