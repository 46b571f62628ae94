from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.storage.sqlite import DATABASE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with SuffixCache.open(tmp_path / "cache") as cache:
        for number in range(100):
            with cache.request([1, 2, 3]) as request:
                request.extend([int(byte) for byte in os.urandom(500 + number)])
    return tmp_path / "cache"


def test_verify(program, folder):
    result = program("cache", "verify", "--path", folder)
    assert (result.exit_code, result.stdout) == (0, f"ok: {folder}\n"), result.stderr
    with closing(sqlite3.connect(folder / DATABASE)) as database, database:
        database.execute("UPDATE sequences SET tokens = x'00' WHERE id = 3")
    result = program("cache", "verify", "--path", folder, "--json")
    values = json.loads(result.stdout)
    assert result.exit_code == 1 and not values["ok"] and "sequence 3" in values["problems"][0]
    assert "sequence 3" in program("cache", "verify", "--path", folder).stdout


def test_compact_gives_room_back(program, folder):
    with closing(sqlite3.connect(folder / DATABASE)) as database, database:
        database.execute("DELETE FROM sequences WHERE id > 10")
    values = json.loads(program("cache", "compact", "--path", folder, "--json").stdout)
    files = sum(file.stat().st_size for file in folder.glob(f"{DATABASE}*"))
    assert values["disk_bytes"] < values["before"] / 2 and files <= values["disk_bytes"]
    with SuffixCache.open(folder) as cache:
        assert cache.stats().sequences == 10
    assert "bytes, " in program("cache", "compact", "--path", folder).stdout


def test_compact_is_refused_while_a_server_writes(program, folder):
    with SuffixCache.open(folder, mode="writer"):
        result = program("cache", "compact", "--path", folder)
    assert (result.exit_code, f"process {os.getpid()}" in result.stderr) == (1, True)
