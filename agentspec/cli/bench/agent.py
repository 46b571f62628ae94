"""`agentspec bench agent`: sessions of a coding agent, and recorded ones whose tools start early."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from agentspec.cli.bench.publish import TORCH, publish
from agentspec.cli.common import ModelOption


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
) -> None:
    """Run whole sessions of a coding agent with transformers and with agentspec cold and warm, interleaved."""
    _refuse_agent(context, bool(tools))
    if tools:
        from agentspec.benchmarks.agent_tools.computed import READ_ONLY, run_agent_tools

        publish(partial(run_agent_tools, tools, read_only=read_only or READ_ONLY, share=share), json)
    else:
        from agentspec.benchmarks.agent import run_agent

        run = partial(run_agent, model, warm=warm, off=off, kept=kept)
        publish(run, json, packages=TORCH, wide=False, subject={"model": model})


def _refuse_agent(context: typer.Context, tools: bool) -> None:
    """Refuse what `bench agent` would ignore in the way of running that the other parameters choose."""
    if tools:
        _refuse(context, "with --tools", "off", "kept", "warm", "model")
    else:
        _refuse(context, "without --tools", "read_only", "share")


def _refuse(context: typer.Context, where: str, *ignored: str) -> None:
    """Refuse parameters that the command line gives, but that are ignored there. Raises `typer.BadParameter`."""
    for name in ignored:
        if getattr(context.get_parameter_source(name), "name", None) == "COMMANDLINE":
            raise typer.BadParameter(f"cannot be given {where}", param_hint=f"--{name.replace('_', '-')}")
