"""Names of sessions, workflows, steps, tenants and models: any string of Python's is kept as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.cache import SuffixCache
from agentspec.errors import InvalidRequestError
from agentspec.types import Namespace

ODD = ["a\udfffb", "nul\0nul", "\x1ad800", "", "é" * 3000, "'; DROP TABLE sequences; --"]


@pytest.mark.parametrize("name", ["\ud800", *(pytest.param(name, marks=pytest.mark.slow) for name in ODD)])
def test_any_string_is_a_name(location: str | Path, name: str) -> None:
    namespace = Namespace(name, name, name, name)
    with SuffixCache.open(location, mode="writer") as cache:
        for number in range(3):
            labels = {"session": f"{name}{number}", "workflow": name, "step": name}
            with cache.request([7], namespace=namespace, **labels) as request:
                request.extend([40 + number, 50, 60, 70])
        cache.compact()
    with SuffixCache.open(location, mode="writer") as cache:  # the lock is free
        assert cache.stats().sequences == 3
        assert cache.stats().segment_error is None
        assert cache.forget(session=f"{name}0") == 1
        assert cache.forget(tenant=name, tokenizer=name) == 2
    with SuffixCache.open(location, mode="writer") as cache:
        assert cache.stats().sequences == 0


@pytest.mark.parametrize("name", [b"bytes", 5, ["s"], object()])
def test_what_is_no_string_is_refused_by_name(name: object) -> None:
    with SuffixCache.open() as cache:
        for label in ("session", "workflow", "step"):
            with pytest.raises(InvalidRequestError, match=label) as caught:
                cache.request([1], **{label: name})  # type: ignore[arg-type]
            assert caught.value.param == label
        with pytest.raises(InvalidRequestError, match="namespace") as caught:
            cache.request([1], namespace=name)  # type: ignore[arg-type]
        assert caught.value.param == "namespace"
        with pytest.raises(InvalidRequestError, match="namespace"):
            cache.request([1], namespace=Namespace("t", name))  # type: ignore[arg-type]


def test_a_compaction_that_fails_leaves_the_lock_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a fault of ours")

    cache = SuffixCache.open(tmp_path, mode="writer")
    with cache.request([1]) as request:
        request.extend(list(range(20_000)))
    monkeypatch.setattr("agentspec.cache.sync.segment_of", fail)
    with pytest.raises(ValueError, match="a fault of ours"):
        cache.compact()
    cache.close()
    assert not list(tmp_path.glob("*.segment*"))
    cache = SuffixCache.open(tmp_path, mode="writer")
    assert cache.stats().sequences == 1
    assert cache._sync is not None
    monkeypatch.setattr(cache._sync, "report_usage", fail)
    with pytest.raises(ValueError, match="a fault of ours"):
        cache.close()
    assert cache.closed
    SuffixCache.open(tmp_path, mode="writer").close()
