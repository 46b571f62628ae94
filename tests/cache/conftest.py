"""Fixtures of the cache's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Where a new cache can be kept, in each kind of database."""
    return tmp_path / "cache" if request.param == "sqlite" else request.getfixturevalue("postgres")
