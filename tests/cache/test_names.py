"""Names of sessions, workflows, steps, tenants and models: any string of Python's is kept as it is."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from numpy.random import default_rng

from agentspec.cache import SuffixCache
from agentspec.cache.responses import StoredResponse
from agentspec.cache.tool_turns import new_turn
from agentspec.errors import CacheError, CacheUnavailableError, InvalidRequestError
from agentspec.types import Namespace

LONG = "".join(map(chr, default_rng(1).integers(0x4E00, 0x9FFF, 3000)))  # too long for PostgreSQL's indexes
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


@pytest.fixture
def takes_long_names(location: str | Path) -> bool:
    return isinstance(location, Path)


def test_a_name_that_the_database_refuses_holds_up_nobody_else(
    location: str | Path, takes_long_names: bool, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a", LONG, "b", LONG, "c"]
    with SuffixCache.open(location, mode="writer") as cache, caplog.at_level(logging.WARNING):
        assert cache._store is not None
        with cache._store.database.writing():  # so that all are written in one transaction
            for number, tenant in enumerate(names):
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
    assert LONG not in caplog.text and caplog.text.count("refuses some of") == (not takes_long_names)
    with SuffixCache.open(location, mode="writer") as cache:
        assert cache.stats().sequences == (6 if takes_long_names else 3)


def test_a_name_that_the_database_refuses_holds_up_no_turns(location: str | Path, takes_long_names: bool) -> None:
    names = ["a", LONG, "b"]
    taken = [name for name in names if takes_long_names or name != LONG]
    with SuffixCache.open(location, mode="writer") as cache:
        for name in names:
            assert cache.tool_turns.put(new_turn(name, "agent", "session", "{}"))
        cache.tool_turns.flush()
        assert [name for name in names if cache.tool_turns.ids(name, "agent")] == taken


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
    monkeypatch.setattr(cache._sync, "report_learned", fail)
    with pytest.raises(ValueError, match="a fault of ours"):
        cache.close()
    assert cache.closed
    SuffixCache.open(tmp_path, mode="writer").close()
