"""`agentspec usage`: sums by day, tenant, key and model, in three forms."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.usage import UsageRow, day_of

NOW = time.time()
TODAY = day_of(NOW)


@pytest.fixture(autouse=True)
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The day does not end within a test."""
    monkeypatch.setattr(time, "time", lambda: NOW)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with the usage of two tenants."""
    rows = [
        UsageRow("2026-01-01", "a", "ci", "small", 2, 1, 1000, 10, 200, 5, 0),
        UsageRow("2026-01-02", "a", "ci", "small", 1, 0, 500, 0, 100, 0, 0),
        UsageRow("2026-01-02", "a", "laptop", "large", 1, 0, 0, 0, 0, 0, 70),
        UsageRow(TODAY, "b", "=key\n", "", 4, 0, 40, 0, 4, 0, 0),
    ]
    with SuffixCache.open(tmp_path / "cache") as cache:
        cache.usage.add(rows, since=time.time(), day=TODAY)
    (tmp_path / "agentspec.toml").write_text('[cache]\npath = "cache"\n')
    return tmp_path / "cache"


def read(program: Any, *arguments: str) -> Any:
    result = program("usage", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.output)


def test_sums_of_each_tenant_and_their_total(program: Any, folder: Path) -> None:
    found = read(program, "--by", "tenant")
    assert [(one["tenant"], one["requests"], one["prompt_tokens"]) for one in found["usage"]] == [
        ("a", 4, 1500),
        ("b", 4, 40),
    ]
    assert found["total"] == {
        "requests": 8,
        "errors": 1,
        "prompt_tokens": 1540,
        "cached_tokens": 10,
        "completion_tokens": 304,
        "accepted_tokens": 5,
        "estimated_tokens": 70,
    }


@pytest.mark.parametrize(
    ("arguments", "requests"),
    [
        (("--tenant", "a"), 4),
        (("--model", "small"), 3),
        (("--since", "2026-01-02", "--until", "2026-01-02"), 2),
        (("--since", "1d"), 4),
        (("--until", "1d"), 4),
        (("--tenant", "nobody"), 0),
    ],
)
def test_rows_are_chosen(program: Any, folder: Path, arguments: tuple[str, ...], requests: int) -> None:
    assert read(program, *arguments)["total"]["requests"] == requests


def test_lines_are_what_is_asked_for(program: Any, folder: Path) -> None:
    lines = read(program, "--by", "model, day")["usage"]
    assert [(one["model"], one["day"]) for one in lines] == [
        ("", TODAY),
        ("large", "2026-01-02"),
        ("small", "2026-01-01"),
        ("small", "2026-01-02"),
    ]
    assert "tenant" not in lines[0]


def test_a_table_for_people(program: Any, folder: Path) -> None:
    head, *lines, total = program("usage").output.splitlines()
    assert head.split() == "tenant key model requests errors prompt cached completion accepted estimated".split()
    assert lines[0].split() == ["a", "ci", "small", "3", "1", "1,500", "10", "300", "5", "0"]
    assert lines[2].split()[:3] == ["b", "=key?", "-"]
    assert total.split() == ["total", "8", "1", "1,540", "10", "304", "5", "70"]
    assert len({len(line) for line in (head, *lines, total)}) == 1


def test_csv_for_spreadsheets(program: Any, folder: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(program("usage", "--csv").output, newline="")))
    assert [row["requests"] for row in rows] == ["3", "1", "4"]
    assert rows[2]["key"] == "'=key\n", "no formula"


def test_what_cannot_be_asked_is_said(program: Any, folder: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("--by", "week"), "'week'"),
        (("--by", "day,day"), "each once"),
        (("--by", ""), "--by takes"),
        (("--since", "yesterday"), "2026-11-01"),
        (("--until", "2026-02-30"), "--until takes a day"),
        (("--json", "--csv"), "exclude each other"),
    ):
        result = program("usage", *arguments)
        assert result.exit_code == 2 and message in result.stderr, result.stderr
    (tmp_path / "agentspec.toml").write_text("")
    assert "cache is in memory only" in program("usage").stderr


def test_an_empty_store_says_what_fills_it(program: Any, tmp_path: Path) -> None:
    SuffixCache.open(tmp_path / "empty").close()
    assert "[[server.api_keys]]" in program("usage", "--path", tmp_path / "empty").output
