"""`agentspec demo` runs sessions of a coding agent by transformers and by agentspec, and compares time and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentspec.benchmarks.agent_workflows import MEASURED, measured_workflows
from agentspec.cli.common import ModelOption, plural

if TYPE_CHECKING:
    from agentspec.benchmarks.runs import EngineBench, RunTable

PEER, ON, AGAIN = "transformers", "agentspec", "agentspec, again"


def demo(
    sessions: Annotated[int, typer.Option(min=1, max=MEASURED, help="Sessions of the agent")] = 1,
    turns: Annotated[int, typer.Option(min=1, max=8, help="Model calls of a session, each with a longer prompt")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer of a call, in tokens")] = 128,
    model: ModelOption = "smollm2-135m",
    ui: Annotated[bool, typer.Option("--ui", help="Serve the model, and show it on a page of its gateway")] = False,
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes a free one")] = 8700,
) -> None:
    """Run sessions of a coding agent, which edits files and reads what its tools say, by transformers and by agentspec.

    What the tools say is scripted, so that both see the same prompts; the model writes each answer.
    """
    if ui:
        return _serve(model, port)
    from rich.console import Console

    from agentspec.benchmarks.runs import EngineBench

    workflows = measured_workflows(turns)[:sessions]
    with Console().status("") as status:
        bench = EngineBench.load(model, status.update)
        try:
            prompts = [[bench.backend.encode_chat(one.messages(turn)) for turn in range(turns)] for one in workflows]
            runs = _measured(bench, prompts, max_tokens)
        finally:
            bench.close()
    lengths = [len(prompt) for session in prompts for prompt in session]
    made = f"{plural(sessions, 'session')} of {plural(turns, 'call')}"
    typer.echo(f"{made}, with prompts of {min(lengths)} to {max(lengths)} tokens and answers of at most {max_tokens}:")
    typer.echo(_line("answered by", "s/session", "tokens/s", "tok/forward", "speed-up", "same"))
    for variant in (PEER, ON, AGAIN):
        typer.echo(_row(runs, variant, sessions))
    typer.echo("transformers: its `generate`, which reads each prompt from the start and writes a token a forward.")
    typer.echo(_statement(runs))


def _serve(model: str, port: int) -> None:
    """A gateway of the model alone, whatever a configuration file says."""
    from agentspec.proxy.serving import serve
    from agentspec.settings.load import load_settings

    backends = {"local": {"kind": "torch", "model": model}}
    overrides = {"server": {"port": port}, "cache": {"runs_bytes": "64MiB"}, "backends": backends}
    serve(load_settings(None, overrides, only_overridden_backends=True))


def _measured(bench: EngineBench, sessions: list[list[list[int]]], max_tokens: int) -> RunTable:
    """Each call by both, by turns, and then the session again by agentspec, the cache of which knows it."""
    from agentspec.benchmarks.runs import RunTable, ask
    from agentspec.types import Labels, SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    runs = RunTable("demo", turns=len(sessions[0]))
    bench.transformers(sessions[0][0], 1)  # the first call includes one-time setup
    for number, prompts in enumerate(sessions, 1):
        calls = [(prompt, variant) for prompt in prompts for variant in (PEER, ON)]
        for prompt, variant in [*calls, *((prompt, AGAIN) for prompt in prompts)]:
            bench.progress(f"session {number} of {len(sessions)}, a prompt of {len(prompt)} tokens: {variant}")
            if variant == PEER:
                run = bench.transformers(prompt, max_tokens)
            else:
                labels = Labels(f"{number}, {variant}", "coding agent")
                run = bench.loop.run_until_complete(ask(bench.backend, prompt, greedy, ON, labels=labels))
            runs.add(variant, run)
    return runs


def _row(runs: RunTable, variant: str, sessions: int) -> str:
    seconds, speed = sum(run.seconds for run in runs.runs[variant]) / sessions, runs.total_speed(variant)
    forwards, faster = runs.steps_cell(variant) or "-", f"{speed / runs.total_speed(PEER):.2f}x"
    return _line(variant, f"{seconds:.1f}", f"{speed:.1f}", forwards, faster, runs.same(variant, PEER))


def _line(variant: str, *cells: str) -> str:
    return f"{variant:<17}" + "".join(f"{cell:>13}" for cell in cells)


def _statement(runs: RunTable) -> str:
    """The text that says whether the answers are identical."""
    count = len(runs.runs[PEER])
    differ = 2 * count - runs.identical(ON, PEER) - runs.identical(AGAIN, PEER)
    if not differ:
        return f"Answers: identical to those of transformers, token by token, in all {2 * count} calls."
    return (
        f"Answers: NOT identical: {differ} of {2 * count} differ. A near-tie between two tokens can fall either way"
        " when rows are computed in batches of another shape; `agentspec verify` checks whether it was one."
    )
