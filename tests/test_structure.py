"""The shape of the source tree: small rooms, small files, one class for one name, tests beside what they test."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("agentspec", "cache", "backends", "reasoning", "benchmarks")
MODULES = sorted(
    path.relative_to(ROOT)
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)
TESTS = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))

MOST_MODULES = 15  # of a folder, without `__init__.py`
MOST_TESTS = 17  # of a folder: some go across its modules
MOST_LINES = 500
ACROSS = {Path("reliability"), Path("matrix")}  # tests of promises about the whole gateway


def test_folders_are_small():
    modules = Counter(str(path.parent) for path in MODULES if path.name != "__init__.py")
    tests = Counter(str(path.parent) for path in TESTS)
    assert {folder: count for folder, count in modules.items() if count > MOST_MODULES} == {}
    assert {folder: count for folder, count in tests.items() if count > MOST_TESTS} == {}


def test_files_are_short():
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in MODULES}
    assert {path: count for path, count in lengths.items() if count > MOST_LINES} == {}


def test_a_class_name_means_one_thing():
    texts = {path: (ROOT / path).read_text() for path in MODULES}
    written = {path: re.findall(r"^\s*class (\w+)", text, re.M) for path, text in texts.items()}
    counts = Counter(name for names in written.values() for name in names)
    homes = defaultdict(list)
    for path in MODULES:
        if any(counts[name] > 1 for name in written[path]):  # to parse takes long
            for node in ast.walk(ast.parse(texts[path])):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(str(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_tests_stand_where_the_code_does():
    """`tests/cache/storage` tests `cache/storage`, `tests/proxy` tests `agentspec/proxy`."""
    folders = {path.parent.relative_to("tests") for path in TESTS} - ACROSS
    assert [str(folder) for folder in sorted(folders) if not (ROOT / "agentspec" / folder).is_dir()] == []


def test_no_test_adds_an_audit_hook():
    """None can be removed, and before Python 3.12 a thread that starts beside one fails to be traced now and then."""
    programs = (path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__))
    assert [str(path) for path in programs if "addaudithook" in path.read_text()] == []
