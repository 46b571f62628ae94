"""Breaks one guard of the product for the duration of a test: a mutation names a function and what to change in it."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import textwrap
from collections import defaultdict
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType

import pytest

Mutate = Callable[[str, str, str], None]


@functools.cache
def functions(package: ModuleType) -> dict[str, list[FunctionType]]:
    """The functions and methods of a package by their qualified names, each a list of one where the name is unique."""
    found = defaultdict[str, dict[FunctionType, None]](dict)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.name.endswith("_triton"):  # kernels are no functions, and Triton may be missing
            continue
        names = vars(importlib.import_module(module.name))
        classes = [thing for thing in names.values() if isinstance(thing, type)]
        for thing in [*names.values(), *(member for owner in classes for member in vars(owner).values())]:
            function = inspect.unwrap(getattr(thing, "fget", thing))
            if isinstance(function, FunctionType) and function.__module__ == module.name:
                found[function.__qualname__][function] = None
    return {name: list(alike) for name, alike in found.items()}


def function_at(place: str) -> FunctionType:
    """The function or method at "package.module:Class.method", without what decorates it."""
    module, _, name = place.partition(":")
    found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    function = inspect.unwrap(getattr(found, "fget", found))
    assert isinstance(function, FunctionType)
    return function


def mutant_of(function: FunctionType, old: str, new: str) -> CodeType:
    """The code of a function with one expression or statement changed, both written as `ast.unparse` writes them."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    definition.decorator_list = []  # type: ignore[attr-defined]
    source = ast.unparse(definition)
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {function.__qualname__}:\n{source}"
    free = function.__code__.co_freevars  # such as the class that super() looks for
    outer = f"def outer({', '.join(free)}):\n" + textwrap.indent(source.replace(old, new), "    ")
    code = compile(outer, inspect.getfile(function), "exec")
    for _ in range(2):
        (code,) = [part for part in code.co_consts if isinstance(part, CodeType)]
    assert code.co_freevars == free
    return code


def apply_mutation(patch: pytest.MonkeyPatch, package: ModuleType, symbol: str, old: str, new: str) -> None:
    """Change the function or method of `package` that is called `symbol`."""
    found = functions(package).get(symbol, [])
    assert len(found) == 1, f"{len(found)} functions are called {symbol}: {found}"
    patch.setattr(found[0], "__code__", mutant_of(found[0], old, new))
