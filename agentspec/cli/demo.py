"""`agentspec demo` runs a self-refinement workflow with speculation off and on, and compares the calls."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentspec.cli.common import ModelOption

if TYPE_CHECKING:
    from rich.table import Table

    from agentspec.runtime import Runtime
    from agentspec.step.report import StepRow

MODES = ("off", "on")
STEPS = {
    "write": "Write a Python function with a docstring that {task}. Answer with the code only.",
    "critique": "Here is a Python function:\n\n{write}\n\n"
    "Name two weaknesses of this function, in plain English, without any code.",
    "revise": "Here is a Python function:\n\n{write}\n\nA reviewer says:\n\n{critique}\n\n"
    "Write the improved function. Answer with the code only.",
}
TASKS = (
    "returns the n-th Fibonacci number",
    "counts the words in a text file",
    "merges two sorted lists into one",
    "checks whether a string is a palindrome",
    "finds the largest number in a nested list",
    "converts a temperature from Celsius to Fahrenheit",
)
Answers = Mapping[str, str]  # by task and step


def demo(
    tasks: Annotated[int, typer.Option(min=1, max=len(TASKS), help="How many tasks, of three model calls each")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer of a call, in tokens")] = 96,
    model: ModelOption = "smollm2-135m",
    json: Annotated[Path | None, typer.Option(help="Write every answer and figure to this file")] = None,
) -> None:
    """Write, criticise and revise code with a small model, with speculation off and on, and compare."""
    from rich.console import Console

    from agentspec.background import call_sync
    from agentspec.step import report

    console, answers = Console(), dict[str, dict[str, str]]({mode: {} for mode in MODES})
    report().reset()
    with console.status(f"loading {model}") as status:
        runtime = _runtime(model)
        try:
            for number in range(tasks):
                # The modes take turns at going first, so that other load affects both alike.
                for mode in MODES if number % 2 == 0 else MODES[::-1]:
                    status.update(f"task {number + 1} of {tasks}, speculation {mode}")
                    answers[mode] |= refined(runtime, model, max_tokens, number, mode)
        finally:
            call_sync(runtime.aclose)
    rows = {(row.workflow or "", row.step or ""): row for row in report()}
    console.print(_table(rows))
    console.print(statement(answers["off"], answers["on"]), soft_wrap=True)
    if json:
        record = {"identical": answers["off"] == answers["on"], "answers": answers}
        steps = [asdict(row) for row in rows.values()]
        json.write_text(jsonlib.dumps({"model": model, **record, "steps": steps}, indent=2) + "\n")


def _runtime(model: str) -> Runtime:
    """One engine for both modes, with an empty in-memory cache; it keeps no KV slots from call to call."""
    from agentspec.runtime import Runtime
    from agentspec.settings.load import load_settings

    overrides = {
        "backends": {"local": {"kind": "torch", "model": model, "prefix_bytes": 0}},
        "cache": {"path": None, "store": True},
    }
    runtime = Runtime(load_settings(None, overrides, only_overridden_backends=True))
    runtime.start()
    return runtime


def refined(runtime: Runtime, model: str, max_tokens: int, number: int, mode: str) -> Answers:
    """Run one task: write, critique, revise. With speculation off nothing is stored that others could draft from."""
    from agentspec import step, workflow
    from agentspec.langchain import ChatAgentSpec

    on = mode == "on"
    chat = ChatAgentSpec(model=model, runtime=runtime, temperature=0.0, max_tokens=max_tokens, speculation=on, store=on)
    said = {"task": TASKS[number]}
    with workflow(mode, session=f"task-{number}"):
        for name, instruction in STEPS.items():
            said[name] = step(name)(chat.invoke)(instruction.format(**said)).text
    return {f"task {number + 1}, {name}": said[name] for name in STEPS}


def statement(off: Answers, on: Answers) -> str:
    """The text that says whether the outputs are identical, and where they differ."""
    parted = [call for call in off if off[call] != on[call]]
    if not parted:
        characters = sum(map(len, off.values()))
        return f"Outputs: identical with speculation off and on, in all {len(off)} calls ({characters} characters)."
    return "\n".join(
        [
            f"Outputs: NOT identical: {len(parted)} of {len(off)} calls differ between speculation off and on.",
            *(f"  {call}" for call in parted),
            "A near-tie between two tokens can fall either way when rows are computed in batches of another shape;",
            "what follows in the same task then differs as well. Anything else is a bug: please report it.",
        ]
    )


def _table(rows: Mapping[tuple[str, str], StepRow]) -> Table:
    from rich.table import Table

    table = Table(title="self-refinement, speculation off and on")
    table.caption = "tok/s: answer tokens per second of model time"
    for name in ("step", "tokens", "forwards", "tokens/\nforward", "tok/s\noff", "tok/s\non", "speedup"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for name in STEPS:
        table.add_row(name, *_cells(rows["off", name], rows["on", name]))
    return table


def _cells(off: StepRow, on: StepRow) -> list[str]:
    rates = off.tokens_per_second, on.tokens_per_second
    ratio = rates[1] / rates[0] if rates[0] and rates[1] else None
    shown = ["-" if figure is None else f"{figure:.2f}" for figure in (on.tokens_per_step, *rates, ratio)]
    shown[-1] += "x"
    return [str(on.completion_tokens), str(on.verify_steps), *shown]
