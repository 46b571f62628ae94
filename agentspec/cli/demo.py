"""`agentspec demo` runs a self-refinement workflow with speculation off and on, and compares the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from agentspec.cli.common import ModelOption

if TYPE_CHECKING:
    from agentspec.runtime import Runtime
    from agentspec.step.report import StepRow

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
)


def demo(
    tasks: Annotated[int, typer.Option(min=1, max=len(TASKS), help="How many tasks, of three model calls each")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer of a call, in tokens")] = 96,
    model: ModelOption = "smollm2-135m",
) -> None:
    """Write, criticise and revise code with a small model, with speculation off and on, and compare."""
    from rich.console import Console

    from agentspec.background import call_sync
    from agentspec.runtime import Runtime
    from agentspec.settings.load import load_settings
    from agentspec.step import report

    console, answers = Console(), dict[str, list[str]]({"off": [], "on": []})
    report().reset()
    engine = {"kind": "torch", "model": model}  # one for both, whose cache is empty
    overrides = {"backends": {"local": engine}, "cache": {"path": None, "store": True}}
    with console.status(f"loading {model}") as status:
        runtime = Runtime(load_settings(None, overrides, only_overridden_backends=True))
        try:
            runtime.start()
            for number, task in enumerate(TASKS[:tasks]):
                for mode in answers:
                    status.update(f"task {number + 1} of {tasks}, speculation {mode}")
                    answers[mode] += refined(runtime, model, max_tokens, task, mode)
        finally:
            call_sync(runtime.aclose)
    rows = {(row.workflow, row.step): row for row in report()}
    typer.echo(_line("step", "tokens", "forwards", "tokens/forward", "tok/s off", "tok/s on", "speedup"))
    for name in STEPS:
        typer.echo(_compared(name, rows["off", name], rows["on", name]))
    typer.echo(statement(answers["off"], answers["on"]))


def refined(runtime: Runtime, model: str, max_tokens: int, task: str, mode: str) -> list[str]:
    """Run one task: write, critique, revise. With speculation off nothing is stored that others could draft from."""
    from agentspec import step, workflow
    from agentspec.langchain import ChatAgentSpec

    on = mode == "on"
    chat = ChatAgentSpec(model=model, runtime=runtime, temperature=0.0, max_tokens=max_tokens, speculation=on, store=on)
    said: Mapping[str, str] = {"task": task}
    with workflow(mode, session=task):
        for name, instruction in STEPS.items():
            said = {**said, name: step(name)(chat.invoke)(instruction.format(**said)).text}
    return [said[name] for name in STEPS]


def statement(off: list[str], on: list[str]) -> str:
    """The text that says whether the outputs are identical."""
    differ = sum(one != other for one, other in zip(off, on, strict=True))
    if not differ:
        return f"Outputs: identical with speculation off and on, in all {len(off)} calls."
    return (
        f"Outputs: NOT identical: {differ} of {len(off)} calls differ. A near-tie between two tokens can fall either"
        " way when rows are computed in batches of another shape; `agentspec verify` checks whether it was one."
    )


def _compared(step: str, off: StepRow, on: StepRow) -> str:
    """A step's tokens by second of model time, and what speculation did to them."""
    before, after, together = off.tokens_per_second or 0.0, on.tokens_per_second or 0.0, on.tokens_per_step or 0.0
    speedup = f"{after / before:.2f}x" if before else "-"
    figures = (f"{figure:.2f}" for figure in (together, before, after))
    return _line(step, str(on.completion_tokens), str(on.verify_steps), *figures, speedup)


def _line(step: str, *cells: str) -> str:
    return f"{step:<10}" + "".join(f"{cell:>15}" for cell in cells)
