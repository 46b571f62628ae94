from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.check import verify
from agentspec.cache.storage.sqlite import DATABASE

MEMORY = 64 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with SuffixCache.open(tmp_path / "cache") as cache:
        for number in range(200):
            with cache.request([1, 2, 3]) as request:
                request.extend(list(range(number, number + 50)))
    return tmp_path / "cache"


def change(folder: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / DATABASE)) as database, database:
        database.execute(statement, values)


def dump(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / DATABASE)) as database:
        return list(database.iterdump())


def test_a_whole_cache_has_no_problems_and_stays_as_it_is(folder: Path) -> None:
    before = dump(folder)
    stages: list[str] = []
    assert list(verify(folder, MEMORY, stages.append)) == [] and stages == ["database", "index"]
    assert dump(folder) == before


def test_a_folder_in_use_can_be_verified(folder: Path) -> None:
    with SuffixCache.open(folder, mode="writer"):
        assert list(verify(folder, MEMORY)) == []


def test_every_sequence_that_cannot_be_read_is_named(folder: Path) -> None:
    change(folder, "UPDATE sequences SET tokens = ? WHERE id = 7", b"no zlib")
    change(folder, "UPDATE sequences SET token_count = 1000 WHERE id = 9")
    problems = list(verify(folder, MEMORY))
    assert len(problems) == 2 and "sequence 7" in problems[0] and "sequence 9" in problems[1]


def test_a_damaged_page_is_found(folder: Path) -> None:
    content = bytearray((folder / DATABASE).read_bytes())
    for page in range(4096 * 3, len(content), 4096):
        content[page : page + 64] = bytes(range(64))
    (folder / DATABASE).write_bytes(content)
    assert list(verify(folder, MEMORY))


def test_what_is_no_database_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_text("something else")
    [problem] = verify(tmp_path, MEMORY)
    assert "is not a database" in problem
