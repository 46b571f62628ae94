"""Pages of a SQLite database, damaged in every way: what can be read is read, and nothing forgotten survives."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from agentspec.cache import SuffixCache, deleter
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import DATABASE
from agentspec.cache.stored import StoredResponse, new_turn
from agentspec.cache.tokens import SequenceRecord
from agentspec.cli.cache import problems_of as verify
from agentspec.errors import CacheError, CacheFormatError
from agentspec.types import Namespace

PAGE, ROWS, TENANTS = 4096, 180, 3
OLD = "t2"  # whose outputs are older than any retention
Damage = Callable[[bytearray, int], None]


def record(number: int) -> SequenceRecord:
    tokens = np.random.default_rng(number).integers(0, 50_000, 40).astype(np.int32)
    tenant = f"t{number % TENANTS}"
    created = 1000.0 if tenant == OLD else time.time()
    return SequenceRecord(number, Namespace(tenant), f"secret-{tenant}-{number}", tokens, tokens[:0], created)


def opened(folder: Path, mode: str = "follower") -> SequenceStore:
    return SequenceStore.open(folder, disk_bytes=None, mode=mode)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with something in every table."""
    folder = tmp_path_factory.mktemp("sound") / "cache"
    with closing(opened(folder)) as store:
        for number in range(ROWS):
            store.put(record(number))
        store.flush()
    with SuffixCache.open(folder) as cache:
        assert cache.forget(session="secret-t0-0") == 1
        for number in range(2):
            with cache.request([1, 2], namespace=f"t{number}", session=f"secret-t{number}-x") as request:
                request.extend([7, 8, 9])
        for number in range(4):
            stored = StoredResponse(f"r{number}", "t1", time.time(), session="secret-t1-r", response={"id": 1})
            cache.responses.put(stored)
            cache.tool_turns.put(new_turn("t1", "agent", "secret-t1-t", "{}"))
        cache.flush()
    return folder


def zeroed(data: bytearray, at: int) -> None:
    data[at : at + PAGE] = bytes(PAGE)


def scrambled(data: bytearray, at: int) -> None:
    data[at : at + PAGE] = random.Random(at).randbytes(PAGE)


def header(bit: int) -> Damage:
    def flipped(data: bytearray, at: int) -> None:
        data[at + (100 if at == 0 else 0) + bit // 8] ^= 1 << bit % 8

    return flipped


def swapped(by: int) -> Damage:
    def exchanged(data: bytearray, at: int) -> None:
        other = (at + by * PAGE) % len(data)
        data[at : at + PAGE], data[other : other + PAGE] = data[other : other + PAGE], data[at : at + PAGE]

    return exchanged


def cut(data: bytearray, at: int) -> None:
    """The end of the file is gone."""
    del data[max(at, PAGE) :]


DAMAGES: dict[str, Damage] = {
    "zeros": zeroed,
    "noise": scrambled,
    "another kind": header(3),
    "a cell more": header(32),
    "many cells": header(28),
    "another child": header(8 * 11),
    "the next page": swapped(1),
    "a page further on": swapped(7),
    "cut off": cut,
}


def pages(sound: Path) -> int:
    return (sound / DATABASE).stat().st_size // PAGE


def damaged(sound: Path, folder: Path, kind: str, page: int) -> Path:
    shutil.copytree(sound, folder)
    data = bytearray((folder / DATABASE).read_bytes())
    DAMAGES[kind](data, (page - 1) * PAGE)
    (folder / DATABASE).write_bytes(data)
    return folder


def readable(folder: Path) -> set[int]:
    """The numbers of the sequences that are read without any index."""
    with closing(opened(folder)) as store:
        return {record.sequence for record in store.records()}


def holds(folder: Path, text: bytes) -> bool:
    return any(text in file.read_bytes() for file in folder.iterdir() if ".damaged-" not in file.name)


def sequences_of(folder: Path, tenant: str) -> int:
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        query = "SELECT count(*) FROM sequences NOT INDEXED WHERE tenant = ?"
        return int(connection.execute(query, (tenant,)).fetchone()[0])


def check(sound: Path, tmp_path: Path, kind: str, page: int) -> None:
    """What is promised of a database whose page is damaged."""
    folder = damaged(sound, tmp_path / f"{kind}-{page}", kind, page)
    before = (folder / DATABASE).read_bytes()
    try:
        there = readable(folder)
    except CacheFormatError as error:
        assert "saves what can be read" in str(error)
        there = set()
    check_forget(shutil.copytree(folder, folder.with_name("forget")))
    check_use(shutil.copytree(folder, folder.with_name("use")))
    found = verify(folder, 1 << 20)  # from now on it is known
    for _ in range(2):
        with SuffixCache.open(folder, mode="writer", retention=3600.0) as cache:
            assert cache.path == folder and cache.stats().mode == "writer"
            with cache.request([5], namespace="t0", session="new") as request:
                request.extend([6, 7, 8])
            with contextlib.suppress(CacheError):
                cache.flush()
        problems = verify(folder, 1 << 20)
    assert not [one for one in problems if ": sequence " not in one]
    assert sequences_of(folder, OLD) == 0
    assert readable(folder) >= {number for number in there if number in range(ROWS) and number % TENANTS != 2}
    if [one for one in found if ": sequence " not in one]:
        assert [file for file in folder.glob(f"{DATABASE}.damaged-*") if file.read_bytes() == before]
    with SuffixCache.open(folder, mode="follower") as cache:
        cache.forget(tenant="t1")
    assert not holds(folder, b"secret-t1")
    shutil.rmtree(tmp_path, ignore_errors=True)


def check_use(folder: Path) -> None:
    """Whatever is met, the writer goes on, and what `verify` finds is put right by the next."""
    for _ in range(2):
        with SuffixCache.open(folder, retention=3600.0) as cache:
            cache._deleter.expire_soon()
            with contextlib.suppress(CacheError):
                cache._deleter.maintain()
            with cache.request([5], namespace="t0", session="new") as request:
                request.extend([6, 7, 8])
        problems = verify(folder, 1 << 20)
    assert not [one for one in problems if ": sequence " not in one]
    assert sequences_of(folder, OLD) == 0


def check_forget(folder: Path) -> None:
    """It is gone, or an error says that it is not."""
    try:
        with SuffixCache.open(folder, mode="follower") as cache:
            cache.forget(tenant="t1")
    except CacheError:
        return
    assert not holds(folder, b"secret-t1")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(deleter, "_SETTLED", 0.0)  # the daily check comes with the first call
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("kind", "page"), [("zeros", 23), ("a page further on", 23), ("a page further on", 5), ("another kind", 7)]
)
def test_a_damaged_page_breaks_no_promise(sound: Path, tmp_path: Path, kind: str, page: int) -> None:
    check(sound, tmp_path, kind, page)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGES)
def test_nor_does_any_kind_of_damage(sound: Path, tmp_path: Path, kind: str) -> None:
    for page in range(1 + list(DAMAGES).index(kind), pages(sound) + 1, 16):
        check(sound, tmp_path, kind, page)


@pytest.mark.long
@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("first", range(1, 17))
def test_no_damaged_page_breaks_a_promise(sound: Path, tmp_path: Path, kind: str, first: int) -> None:
    for page in range(first, pages(sound) + 1, 16):
        check(sound, tmp_path, kind, page)
