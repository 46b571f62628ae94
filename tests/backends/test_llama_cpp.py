"""llama.cpp's static lookup file holds what followed each pair of tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from agentspec.backends import llama_cpp
from agentspec.cache.record import SequenceRecord
from agentspec.cache.tokens import as_tokens
from agentspec.errors import ConfigurationError
from agentspec.types import Labels, Namespace


def record(tokens: np.ndarray, context: np.ndarray) -> SequenceRecord:
    return SequenceRecord(0, Namespace("t"), Labels(), as_tokens(tokens), as_tokens(context), 0.0)


def read(path: Path) -> dict[tuple[int, ...], dict[int, int]]:
    """The file as llama.cpp reads it: key, number of tokens, each token with its count, until the end."""
    data, at = np.frombuffer(path.read_bytes(), "<i4").tolist(), 0
    found: dict[tuple[int, ...], dict[int, int]] = {}
    while at < len(data):
        key, count = tuple(data[at : at + 4]), data[at + 4]
        at += 5
        assert key not in found and count > 0
        found[key] = dict(zip(data[at : at + 2 * count : 2], data[at + 1 : at + 2 * count : 2], strict=True))
        assert len(found[key]) == count
        at += 2 * count
    return found


@pytest.mark.parametrize("at_once", [1, 50, 4 << 20])
def test_counts_are_those_of_the_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(llama_cpp, "_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    rows = [record(rng.integers(0, 6, rng.integers(1, 40)), rng.integers(0, 6, rng.integers(0, 5))) for _ in range(50)]
    expected: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for row in rows:
        text = [*row.context.tolist()[-2:], *row.tokens.tolist()]
        for one, two, after in zip(text, text[1:], text[2:], strict=False):
            expected[one, two, -1, -1][after] += 1
    assert llama_cpp.write_lookup(tmp_path / "file", rows) == (len(expected), 50)
    assert read(tmp_path / "file") == expected


def test_without_sequences_the_file_is_empty(tmp_path: Path) -> None:
    assert llama_cpp.write_lookup(tmp_path / "file", [record(np.array([1]), np.array([2]))]) == (0, 1)
    assert (tmp_path / "file").read_bytes() == b""


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot write"):
        llama_cpp.write_lookup(tmp_path / "nowhere" / "file", [])


def test_counts_stay_within_what_llama_cpp_computes_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes percentages of a count in 32 bits."""
    assert 100 * llama_cpp._MOST_COUNT < 2**31
    monkeypatch.setattr(llama_cpp, "_MOST_COUNT", 3)
    llama_cpp.write_lookup(tmp_path / "file", [record(np.array([1] * 9), np.array([2]))])
    assert read(tmp_path / "file") == {(1, 1, -1, -1): {1: 3}, (2, 1, -1, -1): {1: 1}}
