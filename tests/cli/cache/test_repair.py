"""`agentspec cache repair` on a database with a damaged page."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from agentspec.cache import SuffixCache
from agentspec.cache.storage.sqlite import DATABASE


def spoiled(folder: Path, table: str) -> Path:
    with SuffixCache.open(folder) as cache, cache.request([1], session="s") as request:
        request.extend([2, 3])
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        [root] = connection.execute(query, (table,)).fetchone()
    with (folder / DATABASE).open("r+b") as file:
        file.seek(4096 * (root - 1))
        file.write(bytes(4096))
    return folder


def test_a_damaged_page_is_listed_then_mended(program, tmp_path: Path) -> None:
    folder = spoiled(tmp_path / "cache", "learned")
    before = (folder / DATABASE).read_bytes()
    listed = program("cache", "repair", "--path", folder)
    assert listed.exit_code == 0 and "learned: rows that cannot be read" in listed.stdout and "--yes" in listed.stdout
    assert (folder / DATABASE).read_bytes() == before
    mended = json.loads(program("cache", "repair", "--path", folder, "--yes", "--json").stdout)
    assert mended["faults"] and mended["lost"] == ["learned: rows that cannot be read: from 1 on"]
    assert (mended["unreadable"], mended["removed"]) == ([], 0)
    assert "ok: every sequence" in program("cache", "repair", "--path", folder).stdout
    assert program("cache", "verify", "--path", folder).exit_code == 0


def test_forgetting_reaches_what_is_left(program, tmp_path: Path) -> None:
    folder = spoiled(tmp_path / "cache", "agentspec_version")
    result = program("cache", "forget", "--session", "s", "--yes", "--path", folder)
    assert result.exit_code == 0 and "forgot 1 sequence" in result.stdout
    assert program("cache", "verify", "--path", folder).exit_code == 0
