"""Reading from an engine's source what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.backends.engine_plugin.source_contract import Requirement, missing

SOURCE = """
from elsewhere import imported as known
class Worker:
    limit: int = 3
    def __init__(self, config):
        self.rows: list = []
        self.first, self.second = 1, 2
    @classmethod
    def make(cls, request, more=None): ...
    async def later(self, a, /, b, *, c): ...
def plain(x): ...
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    (tmp_path / "pkg" / "part.py").write_text(SOURCE)
    (tmp_path / "pkg" / "sub" / "__init__.py").write_text(SOURCE)
    (tmp_path / "pkg" / "broken.py").write_text("def (")
    return tmp_path / "pkg"


@pytest.mark.parametrize("module", ["pkg.part", "pkg.sub"])
def test_what_is_there_is_found(package: Path, module: str) -> None:
    there = [
        Requirement(module, "known"),
        Requirement(module, "plain", ("x",)),
        Requirement(module, "Worker", ("limit", "rows", "first", "second", "make")),
        Requirement(module, "Worker.make", ("request",)),
        Requirement(module, "Worker.later", ("a", "b")),
    ]
    assert missing(package, there) == []


def test_what_is_not_there_is_named(package: Path) -> None:
    absent = {
        Requirement("pkg.part", "unknown"): "pkg.part.unknown",
        Requirement("pkg.part", "Worker.gone"): "pkg.part.Worker.gone",
        Requirement("pkg.part", "Worker", ("limit", "columns")): "pkg.part.Worker (columns)",
        Requirement("pkg.part", "Worker.make", ("more",)): "pkg.part.Worker.make (more)",
        Requirement("pkg.part", "plain", ("x", "y")): "pkg.part.plain (x, y)",
        Requirement("pkg.other", "Worker"): "pkg.other",
        Requirement("pkg.broken", "anything"): "pkg.broken",
    }
    assert missing(package, absent) == list(absent.values())
