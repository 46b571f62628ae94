from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache import SuffixCache


@pytest.fixture
def config(tmp_path: Path, postgres: str) -> Path:
    """Of a cache on a server, with one output of each of two tenants, and segments in the folder `remote`."""
    with SuffixCache.open(postgres) as cache:
        for tenant in ("a", "b"):
            with cache.request([1, 2], namespace=tenant) as request:
                request.extend([3, 4, 5])
    path = tmp_path / "agentspec.toml"
    path.write_text(f"[cache]\npath = {json.dumps(postgres)}\nremote = {json.dumps(str(tmp_path / 'remote'))}\n")
    return path


def test_segments_are_published_and_go_with_what_is_forgotten(program: Any, tmp_path: Path, config: Path) -> None:
    told = program("cache", "publish", "-c", config)
    assert told.exit_code == 0 and told.stdout.startswith("published 2 segments"), told.output
    assert len(list((tmp_path / "remote").glob("*/*.segment"))) == 2
    assert program("cache", "forget", "--tenant", "a", "--yes", "-c", config).exit_code == 0
    assert [path.name for path in (tmp_path / "remote").iterdir() if list(path.iterdir())] == ["b"]
    values = json.loads(program("cache", "publish", "-c", config, "--remote", tmp_path / "other", "--json").stdout)
    assert values == {"published": 1, "remote": str(tmp_path / "other")}


def test_a_cache_without_a_server_publishes_nothing(program: Any, tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path / "cache"):
        pass
    nowhere = program("cache", "publish", "--path", tmp_path / "cache")
    assert (nowhere.exit_code, "give --remote" in nowhere.stderr) == (2, True)
    refused = program("cache", "publish", "--path", tmp_path / "cache", "--remote", tmp_path / "remote")
    assert (refused.exit_code, "needs a database server" in refused.stderr) == (2, True)
