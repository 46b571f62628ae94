"""The set that warms the cache of a benchmark shares no code with the measured ones."""

from __future__ import annotations

import ast

import pytest

from agentspec.recordings.prompt_sets import load_codes, load_prompts


def shared_code(code: str) -> set[str]:
    """Names that the code defines, and its lines of 30 characters or more; special methods are everyone's."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, kinds)}
    lines = {line.strip() for line in code.splitlines() if len(line.strip()) >= 30}
    return {one for one in names | lines if not one.startswith(("__", "def __"))}


@pytest.mark.parametrize("name", ["edit", "edit_short"])
def test_the_warming_set_shares_no_name_and_no_long_line_with_a_measured_set(name: str) -> None:
    warm = set[str]().union(*map(shared_code, load_codes("edit_warm")))
    measured = set[str]().union(*map(shared_code, load_codes(name)))  # type: ignore[arg-type]
    assert measured and not measured & warm
    prompts = [*load_prompts(name), *load_prompts("control")]  # type: ignore[arg-type]
    assert len(prompts) == len(set(prompts))
