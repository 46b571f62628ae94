from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentspec.cache import SuffixCache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with SuffixCache.open(tmp_path / "cache") as cache:
        with cache.request([1, 2, 3]) as request:
            request.extend([4, 5])
        cache.flush()
    return tmp_path / "cache"


def test_stats_of_a_folder(program, folder):
    values = json.loads(program("cache", "stats", "--path", folder, "--json").output)
    assert values["sequences"] == 1
    lines = dict(line.split(maxsplit=1) for line in program("cache", "stats", "--path", folder).output.splitlines())
    assert lines["sequences"] == "1"
    assert set(lines) == set(values)


def test_stats_of_the_configured_folder_while_it_is_in_use(program, folder):
    Path("agentspec.toml").write_text(f'[cache]\npath = "{folder}"\n')
    with SuffixCache.open(folder):
        result = program("cache", "stats", "--json")
    assert json.loads(result.output)["sequences"] == 1


def test_without_a_folder_there_is_nothing_to_look_into(program, tmp_path):
    result = program("cache", "stats")
    assert (result.exit_code, "set cache.path" in result.stderr) == (2, True)
    result = program("cache", "stats", "--path", tmp_path / "absent")
    assert (result.exit_code, "no cache at" in result.stderr) == (2, True)
    assert not (tmp_path / "absent").exists()
