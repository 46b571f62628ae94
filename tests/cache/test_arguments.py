"""What is not a request, a budget, a pattern or a folder is refused with the name of the argument."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.index import IndexDrafter, SuffixIndex
from agentspec.errors import CacheFormatError, ConfigurationError, InvalidRequestError


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


@pytest.mark.parametrize("requests", [None, 5, [5], [None], "ab"])
def test_a_batch_is_of_requests(cache: SuffixCache, requests: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        cache.draft_batch(requests)
    assert refused.value.param == "requests"
    assert cache.draft_batch([]) == []


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
