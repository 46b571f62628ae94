"""Scripted sessions of a coding agent: step by step it edits small files, and reads them again before each step.

The files hold code of the prompt sets. Prompts depend on the script alone, never on a model's answers: files and
earlier answers look as if each step had been done correctly, so that every variant of a benchmark gets the same
prompts. A small model's own answers would be a poor history: it soon repeats them word for word, which would flatter
every drafter.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentspec.recordings.prompt_sets import load_codes
from agentspec.types import Message

MEASURED, MOST_OTHERS = 7, 22  # the shipped code suffices for so many sessions without using any code twice
CODES_OF_OTHER = 4  # codes in one file, which is then about as large as a measured session's

SYSTEM = "You are a coding agent. After each step you are shown what the tools say, and the next step."
EXCERPT_CHARACTERS = 260  # size of the neighbouring functions that a step is about: some hundred tokens
PREFIXES = ("current", "given", "chosen", "actual")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class WorkflowTurn:
    """The request to the agent, and the scripted answer that later turns contain as history."""

    asked: str
    answer: str


@dataclass(frozen=True, slots=True)
class Workflow:
    """One scripted session."""

    name: str
    turns: tuple[WorkflowTurn, ...]

    def messages(self, turn: int) -> list[Message]:
        """The messages up to the request of turn `turn`, counted from 0."""
        messages = [("system", SYSTEM)]
        for earlier in self.turns[:turn]:
            messages += [("user", earlier.asked), ("assistant", earlier.answer)]
        messages.append(("user", self.turns[turn].asked))
        return [{"role": role, "content": content} for role, content in messages]


def measured_workflows(turns: int) -> list[Workflow]:
    """`MEASURED` sessions over code of the prompt sets."""
    large, small = load_codes("edit"), load_codes("edit_short")
    firsts = [f"{code}\n\n\n{added}" for code, added in zip(large[:MEASURED], small[:MEASURED], strict=True)]
    files = zip(firsts, large[MEASURED:], strict=True)
    return [workflow(pair, turns, seed=index) for index, pair in enumerate(files)]


def other_workflows(count: int, turns: int) -> list[Workflow]:
    """At most `MOST_OTHERS` sessions over code that no measured session contains."""
    codes = load_codes("edit_warm")
    files = ["\n\n\n".join(codes[at : at + CODES_OF_OTHER]) for at in range(0, count * CODES_OF_OTHER, CODES_OF_OTHER)]
    return [workflow([file], turns, seed=index) for index, file in enumerate(files)]


def workflow(files: Sequence[str], turns: int, *, seed: int) -> Workflow:
    """A session over files with this code. Its steps document, rename and copy neighbouring functions."""
    rng = random.Random(seed)
    codes = list(files)
    targets = [(number, names) for number, code in enumerate(codes) for names in _groups(code)]
    built: list[WorkflowTurn] = []
    for turn in range(turns):
        number, names = targets[turn % len(targets)]
        code = codes[number]
        wanted, codes[number] = _step(code, names, turn + turn // len(targets), rng)
        done = f"{_tools(_module_name(codes[0]), codes, rng)}\n" if built else ""
        shown = f"{done}$ cat {_module_name(code)}.py\n{code}"
        asked = f"{shown}\n\n{wanted} Return the whole code.\n\n{_excerpt(code, names)}"
        built.append(WorkflowTurn(asked, _excerpt(codes[number], names)))
    return Workflow(_module_name(codes[0]), tuple(built))


def _step(code: str, names: Sequence[str], kind: int, rng: random.Random) -> tuple[str, str]:
    """The next request to the agent, and the file after that step."""
    variables = _variables(code, names)
    match kind % 3:
        case 0:
            return "Add a docstring to each function below.", documented(code, names)
        case 1 if variables:
            old = rng.choice(variables)
            new = f"{rng.choice(PREFIXES)}_{old.rpartition('_')[2]}"
            return f"Rename {old} to {new} in the code below.", renamed(code, old, new)
        case _:
            return "Copy the code below to helpers.py without any changes.", code


def _tools(name: str, codes: Sequence[str], rng: random.Random) -> str:
    tests = 2 * sum(len(functions(code)) for code in codes)
    return f"$ python -m pytest -q tests/test_{name}.py\n{tests} passed in {rng.uniform(0.05, 0.9):.2f}s"


def functions(code: str) -> list[Function]:
    """Functions and methods in order, without nested functions and special methods."""
    return [node for node in _outermost(ast.parse(code)) if not node.name.startswith("__")]


def _outermost(tree: ast.Module) -> Iterator[Function]:
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, Function):
                yield inner


def documented(code: str, names: Sequence[str]) -> str:
    """`code` with a docstring added to each of the named functions that has none."""
    lines = code.splitlines()
    for node in reversed(functions(code)):
        if node.name in names and ast.get_docstring(node) is None:
            first, words = node.body[0], node.name.strip("_").replace("_", " ")
            lines.insert(first.lineno - 1, f'{" " * first.col_offset}"""{words.capitalize()}."""')
    return "\n".join(lines)


def renamed(code: str, old: str, new: str) -> str:
    """`code` with a variable or function renamed; attributes with the same name stay."""
    return re.sub(rf"(?<![.\w]){re.escape(old)}\b", new, code)


def _module_name(code: str) -> str:
    defined = next(node for node in ast.parse(code).body if isinstance(node, Function | ast.ClassDef))
    return defined.name.lower()


def _groups(code: str) -> list[list[str]]:
    """Groups of neighbouring functions, by name; each group has about `EXCERPT_CHARACTERS` of code."""
    groups: list[list[str]] = []
    size = EXCERPT_CHARACTERS
    for node in functions(code):
        if size >= EXCERPT_CHARACTERS:
            groups.append([])
            size = 0
        groups[-1].append(node.name)
        size += len(ast.get_source_segment(code, node) or "")
    return groups


def _excerpt(code: str, names: Sequence[str]) -> str:
    """The code from the first to the last of the named functions, as a fenced block."""
    nodes = [node for node in functions(code) if node.name in names]
    lines = code.splitlines()[nodes[0].lineno - 1 : nodes[-1].end_lineno]
    return "\n".join(["```python", *lines, "```"])


def _variables(code: str, names: Sequence[str]) -> list[str]:
    """Arguments and local variables of the named functions, without `self`."""
    nodes = [inner for node in functions(code) if node.name in names for inner in ast.walk(node)]
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return sorted((arguments | assigned) - {"self"})
