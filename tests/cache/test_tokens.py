"""Arguments: token ids, budgets, and names, which may be any string."""

from __future__ import annotations

import logging
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.random import default_rng

from agentspec.cache import SuffixCache
from agentspec.cache.stored import StoredResponse
from agentspec.cache.tokens import as_tokens
from agentspec.errors import (
    CacheError,
    CacheUnavailableError,
    ConfigurationError,
    InvalidRequestError,
)
from agentspec.types import Namespace


@pytest.mark.parametrize(
    "value", [[1, 2, 3], (1, 2, 3), np.arange(1, 4, dtype=np.uint8), np.arange(1, 7)[::3], [], np.zeros(0)]
)
def test_integers_become_int32(value: Any) -> None:
    tokens = as_tokens(value)
    assert tokens.dtype == np.int32 and tokens.flags.c_contiguous
    assert tokens.tolist() == list(value)
    assert np.shares_memory(as_tokens(tokens), tokens) or not len(tokens), "an array of that kind is not copied"


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
        *(("patience", value) for value in (-1, float("nan"))),
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
        *(("memory_bytes", value) for value in (None, True, 0, 1.5, "1MiB")),
        ("mode", "reader"),
        ("path", "sqlite://host"),
        *(("disk_bytes", value) for value in (True, -1)),
        *(("refuse_patterns", value) for value in ("abc", 5, ["("], [5])),
        *(("responses_bytes", value) for value in (-1, 1.5, None, True)),
    ],
)
def test_arguments_of_opening(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        SuffixCache.open(**{name: value})


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


LONG = "".join(map(chr, default_rng(1).integers(0x4E00, 0x9FFF, 3000)))  # too long for PostgreSQL's indexes


ODD = ["a\udfffb", "nul\0nul", "\x1ad800", "", "é" * 3000, "'; DROP TABLE sequences; --"]


@pytest.fixture
def takes_long_names(location: str | Path) -> bool:
    return isinstance(location, Path)


def test_a_name_that_the_database_refuses_holds_up_nobody_else(
    location: str | Path, takes_long_names: bool, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a", LONG, "b", LONG, "c"]
    with SuffixCache.open(location, mode="writer") as cache, caplog.at_level(logging.WARNING):
        for number, tenant in enumerate(names):  # at once, so that most are written in one transaction
            with cache.request([7], namespace=tenant) as request:
                request.extend([40 + number, 50, 60, 70])
        if takes_long_names:
            cache.flush()
        else:
            with pytest.raises(CacheError, match="2 writes were dropped: the database refused them"):
                cache.flush()
        cache.flush()
        assert cache.stats().store_error is None
        assert cache.stats().unwritten == (0 if takes_long_names else 2)
        with cache.request([7], namespace=LONG) as request:
            request.extend([1, 2])
    assert LONG not in caplog.text and ("refuses some of" in caplog.text) is not takes_long_names
    with SuffixCache.open(location, mode="writer") as cache:
        assert cache.stats().sequences == (6 if takes_long_names else 3)


def test_a_response_that_the_database_refuses_is_no_outage(location: str | Path, takes_long_names: bool) -> None:
    with SuffixCache.open(location, mode="writer") as cache:
        for id_, tenant in (("x" * 300, "a"), ("y", LONG)):
            answer = StoredResponse(id_, tenant, time.time(), response={"id": id_}, items=[])
            assert cache.responses.get(tenant, id_) is None and not cache.responses.delete(tenant, id_)
            if takes_long_names:
                assert cache.responses.put(answer) and cache.responses.get(tenant, id_) == answer
                continue
            with pytest.raises(CacheError, match="cannot hold this") as caught:
                cache.responses.put(answer)
            assert not isinstance(caught.value, CacheUnavailableError)
            assert cache.responses.get(tenant, id_) is None and not cache.responses.delete(tenant, id_)
        nul = StoredResponse("nul\0", "a", time.time(), items=[])
        assert cache.responses.put(nul) and cache.responses.get("a", "nul\0") == nul


@pytest.mark.parametrize("name", [b"bytes", 5, ["s"], object()])
def test_what_is_no_string_is_refused_by_name(name: object) -> None:
    with SuffixCache.open() as cache:
        with pytest.raises(InvalidRequestError, match="session") as caught:
            cache.request([1], session=name)  # type: ignore[arg-type]
        assert caught.value.param == "session"
        with pytest.raises(InvalidRequestError, match="namespace") as caught:
            cache.request([1], namespace=name)  # type: ignore[arg-type]
        assert caught.value.param == "namespace"
        with pytest.raises(InvalidRequestError, match="namespace"):
            cache.request([1], namespace=Namespace("t", name))  # type: ignore[arg-type]
