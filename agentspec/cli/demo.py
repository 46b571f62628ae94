"""`agentspec demo` runs sessions of a coding agent with speculation off and on, and compares the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from agentspec.benchmarks.agent_workflows import MEASURED, Workflow, measured_workflows
from agentspec.cli.common import ModelOption, plural

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend
    from agentspec.benchmarks.runs import RunTable

OFF, ON, AGAIN = "off", "on", "on, same again"


def demo(
    sessions: Annotated[int, typer.Option(min=1, max=MEASURED, help="Sessions of the agent")] = 1,
    turns: Annotated[int, typer.Option(min=1, max=8, help="Model calls of a session, each with a longer prompt")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer of a call, in tokens")] = 64,
    model: ModelOption = "smollm2-135m",
) -> None:
    """Run sessions of a coding agent, which edits files and reads what its tools say, with speculation off and on.

    What the tools say is scripted, so that both see the same prompts; the model writes each answer.
    """
    from rich.console import Console

    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch import TorchBackend
    from agentspec.cache import SuffixCache

    workflows, console = measured_workflows(turns)[:sessions], Console()
    with console.status(f"loading {model}") as status, SuffixCache.open() as cache:
        backend = TorchBackend.load(TorchSettings(model=model), cache=cache)
        try:
            lengths = [len(_prompt(backend, one, turn)) for one in workflows for turn in range(turns)]
            runs = asyncio.run(_measured(backend, workflows, max_tokens, status.update))
        finally:
            asyncio.run(backend.aclose())
    made, sizes = f"{plural(sessions, 'session')} of {plural(turns, 'call')}", f"{min(lengths)} to {max(lengths)}"
    typer.echo(f"{made}, with prompts of {sizes} tokens and answers of at most {max_tokens}:")
    typer.echo(_line("speculation", "s/session", "tokens/s", "tok/forward", "speed-up", "same"))
    for variant in (OFF, ON, AGAIN):
        typer.echo(_row(runs, variant, sessions))
    typer.echo(_statement(runs))


async def _measured(
    backend: TorchBackend, workflows: list[Workflow], max_tokens: int, progress: Callable[[str], None]
) -> RunTable:
    """Each call with speculation off and on, by turns, and then the session on again, with a cache that knows it."""
    from agentspec.benchmarks.runs import RunTable, ask
    from agentspec.types import Labels, SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    runs = RunTable("demo", turns=len(workflows[0].turns))
    for number, workflow in enumerate(workflows, 1):
        calls = [(turn, variant) for turn in range(runs.turns) for variant in (OFF, ON)]
        for turn, variant in [*calls, *((turn, AGAIN) for turn in range(runs.turns))]:
            progress(f"session {number} of {len(workflows)}, call {turn + 1}, speculation {variant}")
            labels, on = Labels(f"{number}, {variant}", "coding agent"), variant != OFF
            tenant, prompt = ON if on else OFF, _prompt(backend, workflow, turn)
            runs.add(variant, await ask(backend, prompt, greedy, tenant, labels=labels, speculation=on))
    return runs


def _prompt(backend: TorchBackend, workflow: Workflow, turn: int) -> list[int]:
    return backend.encode_chat(workflow.messages(turn))


def _row(runs: RunTable, variant: str, sessions: int) -> str:
    seconds, speed = sum(run.seconds for run in runs.runs[variant]) / sessions, runs.total_speed(variant)
    forwards, faster = runs.steps_cell(variant) or "-", f"{speed / runs.total_speed(OFF):.2f}x"
    return _line(variant, f"{seconds:.1f}", f"{speed:.1f}", forwards, faster, runs.same(variant, OFF))


def _line(variant: str, *cells: str) -> str:
    return f"{variant:<15}" + "".join(f"{cell:>13}" for cell in cells)


def _statement(runs: RunTable) -> str:
    """The text that says whether the answers are identical."""
    count = len(runs.runs[OFF])
    differ = 2 * count - runs.identical(ON, OFF) - runs.identical(AGAIN, OFF)
    if not differ:
        return f"Answers: identical with speculation off and on, token by token, in all {2 * count} calls."
    return (
        f"Answers: NOT identical: {differ} of {2 * count} differ. A near-tie between two tokens can fall either way"
        " when rows are computed in batches of another shape; `agentspec verify` checks whether it was one."
    )
