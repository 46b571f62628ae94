from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.index import IndexDrafter
from agentspec.cache.memory.learned import KeptLearned
from agentspec.types import Namespace


def test_nothing_is_kept_of_what_was_dropped_or_taken_back() -> None:
    kept = KeptLearned(room=10)
    names = [Namespace(f"t{number}") for number in range(100)]
    for one in names:
        kept.put(one, b"state")
    assert kept.take(names[-1]) == b"state" and kept.take(names[0]) is None
    assert kept._unsaved == {names[-2]}
    assert kept.take_unsaved() == {names[-2].key: b"state"}


def record(cache: SuffixCache, session: str, *output: int) -> None:
    with cache.request([1, 2], session=session) as request:
        request.extend(output)


def ends(cache: SuffixCache) -> set[float]:
    """The tokens that outputs are known to end with."""
    with cache.request([9], store=False) as request:
        return set(request.drafter.state()[len(IndexDrafter().state()) :: 3].tolist())


@pytest.mark.parametrize("on_disk", [False, True])
def test_no_end_of_what_is_forgotten_is_known(tmp_path: Path, on_disk: bool) -> None:
    with SuffixCache.open(tmp_path if on_disk else None) as cache:
        record(cache, "a", 5, 6, 77)
        record(cache, "b", 5, 6, 88)
        assert ends(cache) == {77, 88}
        assert cache.forget(session="a") == 1
        assert ends(cache) == {88}


@pytest.mark.parametrize("on_disk", [False, True])
def test_nor_by_a_namespace_that_was_not_in_memory_then(tmp_path: Path, on_disk: bool) -> None:
    with SuffixCache.open(tmp_path if on_disk else None) as cache:
        record(cache, "a", 5, 6, 77)
        [partition] = cache._pool.namespaces.partitions()
        assert cache._pool.namespaces._leave(partition)
        assert cache.forget(session="a") == int(on_disk)
        assert ends(cache) == set()
