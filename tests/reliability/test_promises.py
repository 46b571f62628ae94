"""Every numbered promise of docs/operations.md has tests with its number in their names, and a figure."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

CASES = [f"{group}{number}" for group, count in (("U", 12), ("C", 9), ("I", 10)) for number in range(1, count + 1)]


@cache
def numbered(repository: Path) -> frozenset[str]:
    """The tests with a number in their names."""
    texts = (file.read_text() for file in (repository / "tests").rglob("test_*.py"))
    return frozenset(name for text in texts for name in re.findall(r"def (test_[uci]\d+_\w+)", text))


def rows(repository: Path, page: str) -> dict[str, list[str]]:
    """The rows of the section `Promises` of a page, by the numbers in their first cells."""
    part = (repository / "docs" / page).read_text().partition("\n## Promises\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return {case: cells for cells in lines for case in re.findall(r"\b[UCI]\d+\b", cells[0])}


@pytest.mark.parametrize("case", CASES)
def test_a_promise_has_a_row_a_figure_and_tests(case: str, repository: Path) -> None:
    assert any(f"_{case.lower()}_" in name for name in numbered(repository))
    assert case in rows(repository, "operations.md")
    assert rows(repository, "results.md")[case][1].strip()


def test_what_is_said_of_full_lengths_names_long_tests(repository: Path) -> None:
    measured = rows(repository, "results.md")
    said = {pattern for cells in measured.values() for pattern in re.findall(r"-m long -k (\w+)", cells[2])}
    assert len(said) > 7
    texts = [file.read_text() for file in (repository / "tests").rglob("test_*.py")]
    for pattern in said:
        assert any(f"def {pattern}" in text and "mark.long" in text for text in texts), pattern
