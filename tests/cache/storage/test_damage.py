"""Damaged files: sound rows are served, nothing wrong is drafted, nothing forgotten survives, no file is lost."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentspec.cache import SuffixCache
from agentspec.cache.stored import StoredResponse
from agentspec.cli import app
from agentspec.errors import CacheError, CacheFormatError
from agentspec.types import Namespace
from tests.cache.conftest import DATABASE, STATE, execute, knows, outputs, record, text

PAGE, ROWS, TENANTS = 4096, 180, 3
OLD = "t2"  # whose outputs are older than any retention
Damage = Callable[[bytearray, int], None]


def fill(location: str | Path, rows: int) -> None:
    with SuffixCache.open(location) as cache:
        for number in range(rows):
            tenant = f"t{number % TENANTS}"
            record(cache, text(number, 40), [], namespace=tenant, session=f"secret-{tenant}-{number}")
        for number in range(2):
            answer = StoredResponse(f"r{number}", "t1", time.time(), session="secret-t1-r", response={"id": 1})
            cache.responses.put(answer)
        cache.flush()


def verify(folder: Path) -> list[str]:
    """The problems that `agentspec cache verify` finds."""
    result = CliRunner().invoke(app, ["cache", "verify", "--path", str(folder), "--json"])
    return list(json.loads(result.stdout)["problems"])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# Pages.


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with something in every table."""
    folder = tmp_path_factory.mktemp("sound") / "cache"
    fill(folder, ROWS)
    execute(folder, f"UPDATE sequences SET created_at = 1000 WHERE tenant = '{OLD}'")
    with SuffixCache.open(folder) as cache:
        assert cache.forget(session="secret-t0-0") == 1
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


def holds(folder: Path, secret: bytes) -> bool:
    return any(secret in file.read_bytes() for file in folder.iterdir() if ".damaged-" not in file.name)


def check(sound: Path, tmp_path: Path, kind: str, page: int) -> None:
    """What is promised of a database whose page is damaged."""
    folder = shutil.copytree(sound, tmp_path / f"{kind}-{page}")
    data = bytearray((folder / DATABASE).read_bytes())
    DAMAGES[kind](data, (page - 1) * PAGE)
    (folder / DATABASE).write_bytes(data)
    forgetting = shutil.copytree(folder, tmp_path / "forget")
    with contextlib.suppress(CacheError):  # it is gone, or an error says that it is not
        with SuffixCache.open(forgetting, mode="follower") as cache:
            cache.forget(tenant="t1")
        assert not holds(forgetting, b"secret-t1")
    found = [one for one in verify(folder) if ": sequence " not in one]  # from now on the damage is known
    for _ in range(2):
        with SuffixCache.open(folder, mode="writer", retention=3600.0) as cache:
            assert cache.path == folder and cache.stats().mode == "writer"
            for number in range(ROWS):
                output, tenant = text(number, 40), f"t{number % TENANTS}"
                with cache.request(output[:4], namespace=tenant, session="probe", store=False) as request:
                    draft = request.draft(4).tokens.tolist()
                assert draft == output[4 : 4 + len(draft)].tolist() and not (draft and tenant == OLD)
            record(cache, [6, 7, 8, 9, 10], namespace="new")
            with contextlib.suppress(CacheError):
                cache.flush()
            assert knows(cache, [6, 7, 8, 9, 10], "new")
    assert not [one for one in verify(folder) if ": sequence " not in one]
    assert execute(folder, f"SELECT count(*) FROM sequences NOT INDEXED WHERE tenant = '{OLD}'") == [(0,)]
    if found:
        assert data in [file.read_bytes() for file in folder.glob(f"{DATABASE}.damaged-*")]
    with SuffixCache.open(folder, mode="follower") as cache:
        cache.forget(tenant="t1")
    assert not holds(folder, b"secret-t1")
    shutil.rmtree(tmp_path, ignore_errors=True)


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


NOVEL = b"my novel, chapter one: it was a dark and stormy night"


@pytest.mark.parametrize("damage", ["no database", "empty table of contents", "a missing table", "no version"])
def test_a_database_that_cannot_be_used_is_left_whole_under_another_name(tmp_path: Path, damage: str) -> None:
    """By the next writer; what is stored besides sequences is in a file of its own."""
    fill(tmp_path, 6)
    path = tmp_path / DATABASE
    if damage == "no database":
        path.write_bytes(NOVEL)
    elif damage == "empty table of contents":
        path.write_bytes(path.read_bytes()[:100] + bytes(4000))
    else:
        execute(tmp_path, "DROP TABLE deletions" if "table" in damage else "DELETE FROM agentspec_meta")
    before = path.read_bytes()
    with pytest.raises(CacheFormatError):
        SuffixCache.open(tmp_path, mode="follower")
    with SuffixCache.open(tmp_path) as cache:
        record(cache, [6, 7, 8, 9, 10], namespace="new")
        cache.flush()
        assert cache.responses.get("t1", "r0") is not None
    [aside] = [one for one in tmp_path.glob(f"{DATABASE}.damaged-*") if not one.name.endswith(("-wal", "-shm"))]
    assert aside.read_bytes() == before
    assert [6, 7, 8, 9, 10] in outputs(tmp_path)


# Values.

BAD, GOOD = 7, 10  # rows of tenant "t0", of the numbers 6 and 9
CHANGES = [
    "tokens = substr(tokens, 1, 30)",
    "tokens = CAST('text' AS TEXT)",
    "tokens = x'28b52ffd'",
    "token_count = token_count + 100000",
    "token_count = -1",
    "token_count = 'many'",
    "created_at = 'yesterday'",
    "created_at = 9e999",
    "tenant = 't1'",
    "tenant = CAST(x'ff00fe' AS TEXT)",
    "session = x'00ff'",
    "number = 'abc'",
    "namespace = 5",
    f"namespace = '{Namespace('t1').key}'",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_value_costs_its_row_alone(tmp_path: Path, change: str) -> None:
    """SQLite stores any value in any column."""
    fill(tmp_path, 12)
    with SuffixCache.open(tmp_path, mode="follower") as follower:  # a process that was there before
        execute(tmp_path, f"UPDATE sequences SET {change} WHERE id = {BAD}")
        assert knows(follower, text(GOOD - 1, 40), "t0")
        with SuffixCache.open(tmp_path) as cache:
            assert knows(cache, text(GOOD - 1, 40), "t0") and not knows(cache, text(BAD - 1, 40), "t0")
            assert (cache.stats().sequences, cache.stats().store_error) == (11, None)
            cache.flush()
            [problem] = verify(tmp_path)
            assert f"sequence {BAD}" in problem
            assert cache.forget(session="secret-t0-0") == 1
            assert cache.forget(text="nothing like it", decode=str) == 1, "what cannot be searched goes"
            assert verify(tmp_path) == [] and cache.stats().sequences == 10
        assert knows(follower, text(GOOD - 1, 40), "t0")


BYTES = "x'fffe00'"
VALUES = [
    (DATABASE, "sequences", "namespace", BYTES),
    (DATABASE, "sequences", "tenant", BYTES),
    (STATE, "responses", "session", BYTES),
    (STATE, "responses", "created_at", "'text'"),
    (STATE, "responses", "body", "4611686018427387904"),
]


@pytest.mark.parametrize(("file", "table", "column", "value"), VALUES)
def test_forgetting_goes_on(tmp_path: Path, file: str, table: str, column: str, value: str) -> None:
    fill(tmp_path, 4)
    execute(tmp_path, f"UPDATE {table} SET {column} = {value} WHERE rowid = 1", file=file)
    with SuffixCache.open(tmp_path) as cache:
        assert cache.forget(session="secret-t2-2") == 1
        assert cache.forget(text="nowhere", decode=str) == (table == "sequences")  # what cannot be searched goes
        cache.flush()
        cache.forget(older_than=0.0)
    counts = [("sequences", DATABASE), ("responses", STATE)]
    assert [execute(tmp_path, f"SELECT count(*) FROM {table}", file=file) for table, file in counts] == 2 * [[(0,)]]


def test_a_damaged_answer_is_reported(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    execute(tmp_path, "UPDATE responses SET body = 5 WHERE rowid = 1", file=STATE)
    with SuffixCache.open(tmp_path) as cache:
        with pytest.raises(CacheFormatError, match="r0 is damaged"):
            cache.responses.get("t1", "r0")
        assert cache.responses.get("t1", "r1") is not None


@pytest.mark.parametrize(("column", "value"), [("before", "'soon'"), ("before", BYTES), ("searched", "'maybe'")])
def test_a_damaged_deletion_holds_up_nothing(tmp_path: Path, column: str, value: str) -> None:
    """Neither a process that may still have to apply it nor one that opens a segment of the time before."""
    fill(tmp_path, 4)
    with SuffixCache.open(tmp_path, mode="writer") as cache, SuffixCache.open(tmp_path, mode="follower") as follower:
        cache.compact()
        segments = {file: file.read_bytes() for file in tmp_path.glob("*.segment")}
        cache.forget(session="secret-t0-0")
        execute(tmp_path, f"UPDATE deletions SET {column} = {value}")
        assert follower.forget(session="secret-t1-1") == 1
        record(follower, [81, 82, 83, 84, 85])
        follower.flush()
        assert (follower.stats().sequences, follower.stats().store_error) == (3, None)
    for file, data in segments.items():
        file.write_bytes(data)  # as by a process that was killed in between
    with SuffixCache.open(tmp_path) as cache:
        assert cache.stats().sequences == 3 and not knows(cache, text(0, 40), "t0")
        assert knows(cache, [81, 82, 83, 84, 85])
