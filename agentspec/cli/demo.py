"""`agentspec demo` runs a self-refinement workflow in LangGraph with speculation off and on, and compares the calls."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from agentspec.cli.common import ModelOption

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from agentspec.runtime import Runtime
    from agentspec.step.report import StepRow

MODES = ("off", "on")
STEPS = {
    "write": "Write a Python function with a docstring that {task}. Answer with the code only.",
    "critique": "Here is a Python function:\n\n{code}\n\n"
    "Name two weaknesses of this function, in plain English, without any code.",
    "revise": "Here is a Python function:\n\n{code}\n\nA reviewer says:\n\n{review}\n\n"
    "Write the improved function. Answer with the code only.",
}
RESULTS = {"write": "code", "critique": "review", "revise": "revision"}
TASKS = (
    "returns the n-th Fibonacci number",
    "counts the words in a text file",
    "merges two sorted lists into one",
    "checks whether a string is a palindrome",
    "finds the largest number in a nested list",
    "converts a temperature from Celsius to Fahrenheit",
)


class RefinementState(TypedDict, total=False):
    """The task, and the output of each step."""

    task: str
    code: str
    review: str
    revision: str


@dataclass(frozen=True, slots=True)
class DemoCall:
    """One model call of the workflow in one mode."""

    mode: str
    task: int
    step: str
    text: str


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """The first difference between the answers of the two modes: `position` counts characters."""

    task: int
    step: str
    position: int


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

    console = Console()
    report().reset()
    with console.status(f"loading {model}"):
        runtime = _runtime(model)
    try:
        with _progress(console, tasks * len(STEPS)) as advance:
            calls = _run(runtime, model, tasks, max_tokens, advance)
    finally:
        call_sync(runtime.aclose)
    rows = {(row.workflow or "", row.step or ""): row for row in report()}
    differences = divergences(calls)
    console.print(_table(rows))
    console.print(statement(calls, differences), soft_wrap=True)
    if json:
        json.write_text(jsonlib.dumps(_record(model, tasks, max_tokens, calls, rows, differences), indent=2) + "\n")


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


def _run(
    runtime: Runtime, model: str, tasks: int, max_tokens: int, advance: Callable[[str, str], None]
) -> list[DemoCall]:
    """Run each task in both modes. The modes take turns at going first, so that other load affects both alike."""
    from agentspec.step import workflow

    graphs = {mode: _graph(runtime, model, max_tokens, mode, advance) for mode in MODES}
    calls: list[DemoCall] = []
    for number, task in enumerate(TASKS[:tasks]):
        for mode in MODES if number % 2 == 0 else MODES[::-1]:
            with workflow(mode, session=f"task-{number}"):
                final = graphs[mode].invoke({"task": task})
            calls += [DemoCall(mode, number, step, final[result]) for step, result in RESULTS.items()]
    return calls


def _graph(runtime: Runtime, model: str, max_tokens: int, mode: str, advance: Callable[[str, str], None]) -> Any:
    """The graph write -> critique -> revise. Calls with speculation off store nothing that others could draft from."""
    from langgraph.graph import END, START, StateGraph

    from agentspec.langchain import ChatAgentSpec

    on = mode == "on"
    chat = ChatAgentSpec(model=model, runtime=runtime, temperature=0.0, max_tokens=max_tokens, speculation=on, store=on)
    builder: Any = StateGraph(RefinementState)
    for name, instruction in STEPS.items():
        builder.add_node(name, _node(name, instruction, chat, lambda text: advance(mode, text)))
    for before, after in zip([START, *STEPS], [*STEPS, END], strict=True):
        builder.add_edge(before, after)
    return builder.compile(name="self-refinement")


def _node(
    name: str, instruction: str, chat: Any, advance: Callable[[str], None]
) -> Callable[[RefinementState], dict[str, str]]:
    from agentspec import step

    @step(name)
    def node(state: RefinementState) -> dict[str, str]:
        pieces = []
        for chunk in chat.stream(instruction.format(**state)):
            pieces.append(str(chunk.content))
            advance("")
        advance(name)
        return {RESULTS[name]: "".join(pieces)}

    return node


def divergences(calls: Sequence[DemoCall]) -> list[AnswerDifference]:
    """The calls whose answers differ between the modes."""
    answers = {(call.mode, call.task, call.step): call.text for call in calls}
    found = []
    for mode, task, step in answers:
        off, on = answers["off", task, step], answers["on", task, step]
        if mode == "off" and off != on:
            position = next((at for at, pair in enumerate(zip(off, on, strict=False)) if pair[0] != pair[1]), None)
            found.append(AnswerDifference(task, step, min(len(off), len(on)) if position is None else position))
    return found


def statement(calls: Sequence[DemoCall], differences: Sequence[AnswerDifference]) -> str:
    """The text that says whether the outputs are identical, and where they differ."""
    compared = sum(call.mode == "off" for call in calls)
    characters = sum(len(call.text) for call in calls if call.mode == "off")
    if not differences:
        return f"Outputs: identical with speculation off and on, in all {compared} calls ({characters} characters)."
    first = [f"  task {one.task + 1}, {one.step}: from character {one.position}" for one in differences]
    return "\n".join(
        [
            f"Outputs: NOT identical: {len(differences)} of {compared} calls differ between speculation off and on.",
            *first,
            "A near-tie between two tokens can fall either way when rows are computed in batches of another shape;",
            "what follows in the same task then differs as well. Anything else is a bug: please report it.",
        ]
    )


@contextmanager
def _progress(console: Console, calls: int) -> Iterator[Callable[[str, str], None]]:
    """Show a bar per mode of finished calls and streamed pieces: `advance(mode, step)`, with step "" for a piece."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("speculation {task.fields[mode]:<3}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("calls  {task.fields[pieces]:>4} pieces streamed  {task.fields[last]:<9}"),
    )
    with Progress(*columns, console=console) as bars:
        tasks = {mode: bars.add_task(mode, total=calls, mode=mode, pieces=0, last="") for mode in MODES}

        def advance(mode: str, step: str) -> None:
            shown = bars.tasks[tasks[mode]].fields
            last, pieces = step or shown["last"], shown["pieces"] + (not step)
            bars.update(tasks[mode], advance=bool(step), pieces=pieces, last=last)

        yield advance


def _table(rows: dict[tuple[str, str], StepRow]) -> Table:
    from rich.table import Table

    table = Table(
        title="self-refinement, speculation off and on", caption="tok/s: answer tokens per second of model time"
    )
    for name in ("step", "tokens", "forwards", "tokens/\nforward", "tok/s\noff", "tok/s\non", "speedup"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for name, off, on in [*_pairs(rows), ("all", _sum(rows, "off"), _sum(rows, "on"))]:
        table.add_row(name, *_cells(off, on), style="bold" if name == "all" else None)
    return table


def _pairs(rows: dict[tuple[str, str], StepRow]) -> Iterator[tuple[str, StepRow, StepRow]]:
    for step in STEPS:
        yield step, rows["off", step], rows["on", step]


def _sum(rows: dict[tuple[str, str], StepRow], mode: str) -> StepRow:
    from agentspec.step.report import StepRow

    chosen = [asdict(row) for (workflow, _), row in rows.items() if workflow == mode]
    names = [name for name in chosen[0] if name not in ("workflow", "step")]
    return StepRow(mode, "all", **{name: sum(row[name] for row in chosen) for name in names})


def _cells(off: StepRow, on: StepRow) -> list[str]:
    ratio = speedup(off, on)
    figures = (on.tokens_per_step, off.tokens_per_second, on.tokens_per_second)
    shown = ["-" if figure is None else f"{figure:.2f}" for figure in figures]
    return [str(on.completion_tokens), str(on.verify_steps), *shown, "-" if ratio is None else f"{ratio:.2f}x"]


def speedup(off: StepRow, on: StepRow) -> float | None:
    """Tokens per second with speculation divided by those without, prefill included in both."""
    before, after = off.tokens_per_second, on.tokens_per_second
    return after / before if before and after else None


def _record(
    model: str,
    tasks: int,
    max_tokens: int,
    calls: Sequence[DemoCall],
    rows: dict[tuple[str, str], StepRow],
    differences: Sequence[AnswerDifference],
) -> dict[str, Any]:
    return {
        "model": model,
        "tasks": tasks,
        "max_tokens": max_tokens,
        "identical": not differences,
        "divergences": [asdict(one) for one in differences],
        "speedup": speedup(_sum(rows, "off"), _sum(rows, "on")),
        "steps": [asdict(row) for row in rows.values()],
        "calls": [asdict(call) for call in calls],
    }
