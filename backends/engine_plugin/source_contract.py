"""Tells what an engine's source lacks of what a plug-in needs, without importing the engine.

The same reader serves the plug-in, for the engine it was loaded by, and tests, for releases that are only unpacked.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.alias


class Requirement(NamedTuple):
    """A class, function or imported name that must exist, as `module` and dotted `name`.

    Of a function, `parts` are its first parameters, in order, without `self` or `cls`. Of a class, `parts` are fields,
    methods or attributes, in any order.
    """

    module: str
    name: str
    parts: tuple[str, ...] = ()


def missing(package: Path, requirements: Iterable[Requirement]) -> list[str]:
    """What the package in that folder lacks, as names an operator can look up; empty if it has everything."""
    by_module: dict[str, list[Requirement]] = defaultdict(list)
    for requirement in requirements:
        by_module[requirement.module].append(requirement)
    found: list[str] = []
    for module, needed in by_module.items():
        tree = _parse(package, module)
        if tree is None:
            found.append(module)
        else:
            found += [lack for requirement in needed if (lack := _lack(tree, requirement))]
    return found


def _parse(package: Path, module: str) -> ast.Module | None:
    path = package.joinpath(*module.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        try:
            return ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
    return None


def _lack(tree: ast.Module, requirement: Requirement) -> str:
    """What is missing of one requirement; an empty string if nothing is."""
    module, name, parts = requirement
    definition = _find(tree.body, name)
    if definition is None:
        return f"{module}.{name}"
    if isinstance(definition, ast.ClassDef):
        there = _members(definition)
        absent = [part for part in parts if part not in there]
    elif isinstance(definition, ast.alias):
        absent = []
    else:
        absent = list(parts) if _parameters(definition)[: len(parts)] != list(parts) else []
    return f"{module}.{name} ({', '.join(absent)})" if absent else ""


def _find(body: Iterable[ast.stmt], name: str) -> _Definition | None:
    first, _, rest = name.partition(".")
    for statement in body:
        if isinstance(statement, ast.ClassDef) and statement.name == first:
            return _find(statement.body, rest) if rest else statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == first:
            return statement
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == first:
                    return alias
    return None


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _members(definition: ast.ClassDef) -> set[str]:
    """Fields and methods of a class, and the attributes that its methods set on `self`."""
    names = {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute) and _is_set_on_self(node)}
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(statement, ast.Assign):
            names.update(target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(statement.name)
    return names


def _is_set_on_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
