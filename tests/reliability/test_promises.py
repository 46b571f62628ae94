"""Every numbered promise of docs/reliability.md has tests with its number in their names, and a figure."""

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


def rows(repository: Path, title: str) -> dict[str, list[str]]:
    """The rows of all tables up to, or from, the heading `Measured`, by the numbers in their first cells."""
    before, _, after = (repository / "docs" / "reliability.md").read_text().partition("## Measured")
    part = after if title == "Measured" else before
    lines = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return {case: cells for cells in lines for case in re.findall(r"\b[UCI]\d+\b", cells[0])}


@pytest.mark.parametrize("case", CASES)
def test_a_promise_has_a_row_a_figure_and_tests(case: str, repository: Path) -> None:
    assert any(f"_{case.lower()}_" in name for name in numbered(repository))
    assert case in rows(repository, "promised")
    assert rows(repository, "Measured")[case][1].strip()


def test_what_is_said_of_full_lengths_names_long_tests(repository: Path) -> None:
    measured = rows(repository, "Measured")
    said = {pattern for cells in measured.values() for pattern in re.findall(r"-m long -k (\w+)", cells[2])}
    assert len(said) > 8
    texts = [file.read_text() for file in (repository / "tests" / "reliability").glob("*.py")]
    for pattern in said:
        assert any(f"def {pattern}" in text and "mark.long" in text for text in texts), pattern
