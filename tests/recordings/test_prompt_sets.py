"""The shipped prompts are well formed, and the warming set shares no code with the measured ones."""

from __future__ import annotations

import ast
import json
from importlib.resources import files

import pytest

EDIT_SETS = ["edit", "edit_short", "edit_warm"]
MEASURED = EDIT_SETS[:2]
LONG_LINE = 30


def prompt_text(name: str) -> str:
    return files("agentspec.recordings").joinpath("prompts", f"{name}.jsonl").read_text(encoding="utf-8")


def records(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in prompt_text(name).splitlines()]


def defined_names(code: str) -> set[str]:
    """Names of all functions, methods and classes, without those Python itself gives a meaning."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, kinds)}
    return {name for name in names if not name.startswith("__")}


def long_lines(code: str) -> set[str]:
    """Lines that could give a warmed cache an answer; special methods' signatures are everyone's."""
    lines = {line.strip() for line in code.splitlines() if not line.strip().startswith("def __")}
    return {line for line in lines if len(line) >= LONG_LINE}


def test_ids_are_unique_over_all_sets() -> None:
    ids = [record["id"] for name in [*EDIT_SETS, "control"] for record in records(name)]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", MEASURED)
def test_warming_set_defines_no_measured_name(name: str) -> None:
    warm = set().union(*(defined_names(record["code"]) for record in records("edit_warm")))
    measured = set().union(*(defined_names(record["code"]) for record in records(name)))
    assert measured and not measured & warm


@pytest.mark.parametrize("name", MEASURED)
def test_warming_set_holds_no_long_line_of_a_measured_task(name: str) -> None:
    warm = set().union(*(long_lines(record["code"]) for record in records("edit_warm")))
    measured = set().union(*(long_lines(record["code"]) for record in records(name)))
    assert measured and not measured & warm
