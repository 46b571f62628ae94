from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.index import IndexDrafter, SuffixIndex
from agentspec.cache.tokens import as_tokens
from agentspec.errors import CacheFormatError, ConfigurationError, InvalidRequestError


@pytest.mark.parametrize("value", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), np.array([1, 2, 3], dtype=np.uint8)])
def test_integers_become_int32(value: object) -> None:
    tokens = as_tokens(value)  # type: ignore[arg-type]
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [1, 2, 3]


def test_an_int32_array_is_not_copied() -> None:
    array = np.arange(5, dtype=np.int32)
    assert np.shares_memory(as_tokens(array), array)


def test_strided_arrays_become_contiguous() -> None:
    tokens = as_tokens(np.arange(10, dtype=np.int32)[::2])
    assert tokens.flags.c_contiguous
    assert tokens.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("value", [[], (), np.zeros(0)])
def test_nothing_is_an_empty_array(value: object) -> None:
    assert as_tokens(value).dtype == np.int32  # type: ignore[arg-type]
    assert len(as_tokens(value)) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [
        [1.0, 2.0],
        [True, False],
        ["a"],
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        np.zeros((2, 2), dtype=np.int32),
        [-1],
        [2**31 - 1],
        np.array([5, 2**31 - 1], dtype=np.int32),
        np.array([2**31 - 1], dtype=np.uint32),
        [2**31],
        [2**70],
        5,
        None,
    ],
)
def test_what_are_not_token_ids_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        as_tokens(value, "prompt")  # type: ignore[arg-type]
    assert caught.value.param == "prompt"


@pytest.fixture
def cache() -> Iterator[SuffixCache]:
    with SuffixCache.open() as cache:
        yield cache


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("behind", value) for value in (5, None, np.int32(5), [2**31 - 1], iter([1]), [[1]])),
        *(("max_tokens", value) for value in (-1, 2**63, 2**70, "3", True)),
        *(("patience", value) for value in (-1, float("nan"), "a")),
    ],
)
def test_arguments_of_a_draft(cache: SuffixCache, name: str, value: Any) -> None:
    with cache.request([1, 2]) as request:
        request.extend([3, 4, 1, 2])
        with pytest.raises(InvalidRequestError) as refused:
            request.draft(**{name: value})
        assert refused.value.param == name
        assert request.draft(2, patience=float("inf"), behind=[]).tokens.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("memory_bytes", value) for value in (None, True, 0, 1.5)),
        *(("disk_bytes", value) for value in (True, -1)),
        *(("tenant_namespaces", value) for value in (True, 1.0, 0)),
        *(("refuse_patterns", value) for value in ("abc", 5, ["("], [5])),
        *(("responses_bytes", value) for value in (-1, 1.5, None, True)),
        *(("responses_age", value) for value in (-1, float("nan"), "a")),
    ],
)
def test_arguments_of_opening(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        SuffixCache.open(**{name: value})


def test_what_decodes_is_a_function(cache: SuffixCache) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        cache.forget(text="a", decode=5)  # type: ignore[arg-type]
    assert refused.value.param == "decode"


def test_arrays_of_another_shape_and_ends_that_are_no_tokens() -> None:
    index, drafter = SuffixIndex(), IndexDrafter()
    index.append(1, [1, 2])
    with pytest.raises(InvalidRequestError):
        index.common_prefix(1, np.zeros((2, 2), dtype=np.int32))
    for token in (-1, 2**31 - 1, 2**40, 1.5, None):
        with pytest.raises(InvalidRequestError):
            drafter.observe_end(token)  # type: ignore[arg-type]
    with pytest.raises(CacheFormatError):
        drafter.restore(np.zeros((2, 2)))


@pytest.mark.parametrize("name", ["what?mode=memory", "a#b%20c", ":memory:", "line\nbreak", "\udcff"])
def test_any_name_of_a_folder_is_its_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    with SuffixCache.open(folder) as cache:
        with cache.request([1, 2]) as request:
            request.extend([3, 4, 5])
        cache.flush()
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "sequences.sqlite3").stat().st_size > 0
    assert stat.S_IMODE((folder / "sequences.sqlite3").stat().st_mode) == 0o600
    with SuffixCache.open(folder) as cache:
        assert cache.stats().sequences == 1
