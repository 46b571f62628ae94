"""`agentspec bench agent`: sessions of a coding agent, recorded ones whose tools start early, and reading ahead."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from agentspec.cli.common import ModelOption
from agentspec.cli.publish import TORCH, publish


def agent(
    context: typer.Context,
    model: ModelOption = "smollm2-135m",
    warm: Annotated[int, typer.Option(help="Other sessions before the warm ones", min=1, max=22)] = 20,
    off: Annotated[bool, typer.Option("--off", help="Time agentspec without speculation too")] = False,
    kept: Annotated[
        bool, typer.Option("--kept", help="Time transformers with key/value rows kept between turns too")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write every answer's figures to this file")] = None,
    tools: Annotated[
        list[Path] | None,
        typer.Option(help="Instead, predict the tool calls of these recorded sessions", exists=True, dir_okay=False),
    ] = None,
    read_only: Annotated[
        list[str] | None, typer.Option(help="With --tools: patterns of the names of tools that may run early")
    ] = None,
    share: Annotated[
        float, typer.Option(help="With --tools: the share of the time that tools take", min=0.01, max=0.99)
    ] = 0.5,
    timed: Annotated[
        int, typer.Option(help="With --tools: run so many sessions of each file in real time instead", min=0)
    ] = 0,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Instead, time next turns with and without reading ahead while tools run")
    ] = False,
    tool_seconds: Annotated[
        list[float] | None,
        typer.Option(help="How long tools take: with --timed; with --prefill, several times (1)", min=0.0, max=60.0),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="With --prefill: pairs of sessions for each case and length of tools", min=7)
    ] = 7,
    processor_time: Annotated[
        bool, typer.Option("--processor-time", help="With --prefill: tools take processor time of this process")
    ] = False,
) -> None:
    """Run whole sessions of a coding agent with transformers and with agentspec cold and warm, interleaved."""
    _refuse_agent(context, bool(tools), timed, prefill, tool_seconds or ())
    if tools:
        _agent_tools(model, tools, read_only, share, timed, tool_seconds, json)
    elif prefill:
        from agentspec.benchmarks.agent_prefill import TOOL_SECONDS, run_agent_prefill

        told = tool_seconds or TOOL_SECONDS, rounds, processor_time
        publish(partial(run_agent_prefill, model, *told), json, packages=TORCH, subject={"model": model})
    else:
        from agentspec.benchmarks.agent import run_agent

        run = partial(run_agent, model, warm=warm, off=off, kept=kept)
        publish(run, json, packages=TORCH, wide=False, subject={"model": model})


def _refuse_agent(
    context: typer.Context, tools: bool, timed: int, prefill: bool, tool_seconds: Sequence[float]
) -> None:
    """Refuse what `bench agent` would ignore in the way of running that the other parameters choose."""
    if tools:
        _refuse(context, "with --tools", "prefill", "off", "kept", "warm", *(() if timed else ("model",)))
    else:
        _refuse(context, "without --tools", "timed", "read_only", "share")
    if prefill:
        _refuse(context, "with --prefill", "off", "kept", "warm")
    else:
        _refuse(context, "without --prefill", "processor_time", "rounds")
    if not (prefill or timed):
        _refuse(context, "without --prefill or --timed", "tool_seconds")
    if tool_seconds and timed:
        _refuse(context, "with --tool-seconds", "share")
    if len(tool_seconds) > 1 and timed:
        _refuse(context, "more than once with --timed", "tool_seconds")


def _agent_tools(
    model: str,
    tools: list[Path],
    read_only: list[str] | None,
    share: float,
    timed: int,
    tool_seconds: list[float] | None,
    json: Path | None,
) -> None:
    """`bench agent --tools`: computed, or some sessions of each file in real time."""
    from agentspec.benchmarks.agent_tools.computed import READ_ONLY, run_agent_tools

    early = read_only or READ_ONLY
    if not timed:
        publish(partial(run_agent_tools, tools, read_only=early, share=share), json)
        return
    from agentspec.benchmarks.agent_tools.timed import TimedPlan, run_agent_timed

    plan = TimedPlan(early, timed, share, tool_seconds[0] if tool_seconds else None)
    publish(partial(run_agent_timed, model, tools, plan), json, packages=TORCH, subject={"model": model})


def _refuse(context: typer.Context, where: str, *ignored: str) -> None:
    """Refuse parameters that the command line gives, but that are ignored there. Raises `typer.BadParameter`."""
    for name in ignored:
        if getattr(context.get_parameter_source(name), "name", None) == "COMMANDLINE":
            raise typer.BadParameter(f"cannot be given {where}", param_hint=f"--{name.replace('_', '-')}")
