"""The measurements of engines on their devices: `agentspec bench gpu` and `bench vllm`."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from agentspec.cli.bench.publish import TORCH, publish
from agentspec.cli.common import FAILED


class ModelShape(StrEnum):
    tiny = "tiny"
    small = "1b"
    medium = "3b"
    large = "8b"


class DeviceKind(StrEnum):
    cuda = "cuda"
    cpu = "cpu"


def vllm(
    python: Annotated[
        Path | None, typer.Option(help="Interpreter that has vLLM and agentspec [default: that of .venv-vllm]")
    ] = None,
    device: Annotated[DeviceKind, typer.Option(help="What that vLLM runs on")] = DeviceKind.cuda,
    shape: Annotated[ModelShape, typer.Option(help="Sizes of the random model")] = ModelShape.medium,
    variant: Annotated[
        list[str] | None, typer.Option(help="Drafters beside off, as agentspec or ngram_gpu; all if not given")
    ] = None,
    part: Annotated[list[str] | None, typer.Option(help="answers or calls; both if not given")] = None,
    traces: Annotated[
        list[Path] | None,
        typer.Option(help="Recorded calls, FILE.jsonl.gz, to force as answers", exists=True, dir_okay=False),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with a ChatML tokenizer.json, for --traces", exists=True, file_okay=False),
    ] = None,
    learned: Annotated[
        int, typer.Option(help="Calls of each file, at most half, that our caches learn before others are timed", min=0)
    ] = 0,
    seconds: Annotated[float, typer.Option(help="No call begins after so much time", min=1)] = 570.0,
    start: Annotated[float, typer.Option(help="Seconds within which the engines must be ready", min=1)] = 300.0,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file")] = None,
) -> None:
    """Time recorded calls on vLLM with each drafter, with random weights; exit code 1 where an answer is not equal."""
    from agentspec.benchmarks.vllm.bench import ForcedPart, ForcedPlan, run_forced
    from agentspec.benchmarks.vllm.engine import find_environment

    try:
        parts = tuple(ForcedPart(name) for name in part or ForcedPart)
    except ValueError:
        raise typer.BadParameter(f"must be one of {', '.join(ForcedPart)}", param_hint="--part") from None
    if bool(traces) != (tokenizer is not None) or (ForcedPart.calls in parts and not traces):
        raise typer.BadParameter("--traces and --tokenizer go together; without both only --part answers can run")
    found = python or ((folder := find_environment()) and folder / "bin" / "python")
    if found is None:
        raise typer.BadParameter("no vLLM found: run .ci/vllm-env, or name an interpreter", param_hint="--python")
    plan = ForcedPlan(
        found, device.value, shape.value, tuple(variant or ()), parts,
        tuple(traces or ()), tokenizer, learned, seconds, start,
    )  # fmt: skip
    if not publish(partial(run_forced, plan), json, subject={"interpreter": str(found)}).sound:
        raise typer.Exit(FAILED)


def gpu(
    shape: Annotated[ModelShape, typer.Option(help="Sizes of the random model")] = ModelShape.large,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    seconds: Annotated[float, typer.Option(help="What does not fit in so much time is left out", min=1)] = 570.0,
    traces: Annotated[
        list[Path] | None,
        typer.Option(help="Recorded calls, FILE.jsonl.gz, to force as targets", exists=True, dir_okay=False),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with a ChatML tokenizer.json, for --traces", exists=True, file_okay=False),
    ] = None,
    questions: Annotated[int, typer.Option(help="Answers of each check", min=1)] = 50,
    learned: Annotated[
        int, typer.Option(help="Calls of each file, at most half, that the cache learns before others are timed", min=0)
    ] = 0,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file")] = None,
) -> None:
    """Check and time the local engine on a device with random weights; exit code 1 where a check fails."""
    from agentspec.benchmarks.gpu.bench import GpuPlan, run_gpu

    if bool(traces) != (tokenizer is not None):
        raise typer.BadParameter("--traces and --tokenizer go together")
    plan = GpuPlan(shape.value, device, dtype, seconds, tuple(traces or ()), tokenizer, questions, learned)
    if not publish(partial(run_gpu, plan), json, packages=TORCH).sound:
        raise typer.Exit(FAILED)
