"""`agentspec bench`: the measurements whose figures the documentation quotes."""

from __future__ import annotations

import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from agentspec.benchmarks.public_logs import Source
from agentspec.cli import bench_retrieval
from agentspec.cli.common import FAILED, REPORT_WIDTH, conditions, require_writable

app = typer.Typer(help="Measure speed-ups on this machine.", no_args_is_help=True)


class Prompts(StrEnum):
    edit = "edit"
    short = "short"
    all = "all"
    control = "control"

    @property
    def sets(self) -> list[Any]:
        """The sets of prompts besides the control, which is always measured."""
        named = {Prompts.edit: ["edit"], Prompts.short: ["edit_short"], Prompts.control: []}
        return named.get(self, ["edit", "edit_short"])


class Shape(StrEnum):
    tiny = "tiny"
    small = "1b"
    large = "8b"


@app.callback()
def bench() -> None:
    """Measure speed-ups on this machine."""


@app.command()
def decode(
    model: Annotated[str, typer.Option(help="Built-in name, folder, GGUF file or model-hub id")] = "smollm2-135m",
    prompts: Annotated[
        Prompts, typer.Option(help="Code edits with long answers, with short ones, or all; or the control alone")
    ] = Prompts.all,
    limit: Annotated[
        int | None, typer.Option(help="Only the first so many prompts of each set (at least 7)", min=7)
    ] = None,
    ngram: Annotated[
        bool, typer.Option("--ngram", help="Time drafts from the request's own text alone, without a cache, too")
    ] = False,
    draft_model: Annotated[str | None, typer.Option(help="Time drafts of this small model alone too")] = None,
    json: Annotated[Path | None, typer.Option(help="Write every run and ratio to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios into this PNG or SVG file")] = None,
) -> None:
    """Decode the same prompts with transformers and with agentspec off, cold and warm, interleaved in one run."""
    from rich.console import Console

    from agentspec.benchmarks.decode import run_decode
    from agentspec.benchmarks.decode_report import print_tables, write_json, write_plot

    console = Console()
    require_writable(json, plot)
    with console.status("starting") as status:
        tables = run_decode(
            model,
            sets=prompts.sets,
            limit=limit,
            progress=status.update,
            ngram=ngram,
            draft_model=draft_model,
        )
    print_tables(tables, console)
    if json:
        write_json(tables, json, conditions("torch", "transformers", model=model))
    if plot:
        write_plot(tables, plot)


@app.command()
def concurrency(
    model: Annotated[str, typer.Option(help="Built-in name, folder, GGUF file or model-hub id")] = "smollm2-135m",
    clients: Annotated[int, typer.Option(help="Requests at once", min=2)] = 8,
    rounds: Annotated[int, typer.Option(help="Measurements, of other prompts each (at least 7)", min=7)] = 7,
    max_tokens: Annotated[int, typer.Option(help="Length of an answer", min=1)] = 128,
    json: Annotated[Path | None, typer.Option(help="Write every run to this file")] = None,
) -> None:
    """Ask several things at once and one after another, speculation off and on."""
    from rich.console import Console

    from agentspec.benchmarks.concurrency import run_concurrency
    from agentspec.benchmarks.concurrency_report import print_table, write_json

    console = Console()
    require_writable(json)
    with console.status("starting") as status:
        table = run_concurrency(model, clients=clients, rounds=rounds, max_tokens=max_tokens, progress=status.update)
    print_table(table, console)
    if json:
        write_json(table, json, conditions("torch", "transformers", model=model))


@app.command("best-of-n")
def best_of_n(
    problems: Annotated[Path, typer.Argument(help="Questions, JSON lines with a field `problem`", exists=True)],
    model: Annotated[str, typer.Option(help="Built-in name, folder, GGUF file or model-hub id")] = "smollm2-135m",
    questions: Annotated[int, typer.Option(help="Questions that are replayed (at least 7)", min=7)] = 12,
    choices: Annotated[int, typer.Option(help="Answers to each", min=2)] = 8,
    max_tokens: Annotated[int, typer.Option(help="Length of an answer", min=1)] = 160,
    temperatures: Annotated[tuple[float, float], typer.Option(help="Two temperatures", min=0.01)] = (0.7, 1.0),
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file")] = None,
) -> None:
    """Sample several answers to each question, and compare drafters that replay them: who serves best-of-N best."""
    from rich.console import Console

    from agentspec.benchmarks.best_of_n_contest import Plan, run_best_of_n
    from agentspec.benchmarks.best_of_n_report import print_report, write_json

    console = Console(width=None if sys.stdout.isatty() else REPORT_WIDTH)
    require_writable(json)
    plan = Plan(model, problems, questions, choices, max_tokens, temperatures)
    with console.status("starting") as status:
        contests = run_best_of_n(plan, status.update)
    print_report(contests, console)
    if json:
        write_json(contests, json, conditions("torch", "transformers", model=model))


@app.command()
def agent(
    model: Annotated[str, typer.Option(help="Built-in name, folder, GGUF file or model-hub id")] = "smollm2-135m",
    warm: Annotated[int, typer.Option(help="Other sessions before the warm ones", min=1, max=22)] = 20,
    off: Annotated[bool, typer.Option("--off", help="Time agentspec without speculation too")] = False,
    kept: Annotated[
        bool, typer.Option("--kept", help="Time transformers with key/value rows kept between turns too")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write every answer's figures to this file")] = None,
) -> None:
    """Run whole sessions of a coding agent with transformers and with agentspec cold and warm, interleaved."""
    from rich.console import Console

    from agentspec.benchmarks.agent_loop import run_agent
    from agentspec.benchmarks.agent_report import print_report, write_json

    console = Console()
    require_writable(json)
    with console.status("starting") as status:
        report = run_agent(model, warm=warm, progress=status.update, off=off, kept=kept)
    print_report(report, console)
    if json:
        write_json(report, json, conditions("torch", "transformers", model=model))


@app.command()
def gpu(
    shape: Annotated[Shape, typer.Option(help="Sizes of the random model")] = Shape.large,
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
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file")] = None,
) -> None:
    """Check and time the local engine on a device with random weights; exit code 1 where a check fails."""
    from rich.console import Console

    from agentspec.benchmarks.gpu import Plan, run_gpu
    from agentspec.benchmarks.gpu_report import print_report, write_json

    if bool(traces) != (tokenizer is not None):
        raise typer.BadParameter("--traces and --tokenizer go together")
    console = Console(width=None if sys.stdout.isatty() else REPORT_WIDTH)
    require_writable(json)
    plan = Plan(shape.value, device, dtype, seconds, tuple(traces or ()), tokenizer, questions)
    with console.status("starting") as status:
        report = run_gpu(plan, status.update)
    print_report(report, console)
    if json:
        write_json(report, json, conditions("torch", "transformers"))
    if not report.sound:
        raise typer.Exit(FAILED)


@app.command()
def cache(
    data: Annotated[
        list[Path],
        typer.Option(help="Recorded calls, FILE.jsonl.gz; more files may follow", exists=True, dir_okay=False),
    ],
    tokenizer: Annotated[Path, typer.Option(help="Folder with a ChatML tokenizer.json", exists=True, file_okay=False)],
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE...]", exists=True, dir_okay=False)] = None,
    calls: Annotated[int, typer.Option(help="Only the first so many calls of each file", min=1)] = 600,
    budgets: Annotated[tuple[int, int], typer.Option(help="Most drafted tokens a step, two values", min=1)] = (8, 32),
    costs: Annotated[bool, typer.Option(help="Measure times and sizes on synthetic text too")] = True,
    open_tokens: Annotated[int, typer.Option(help="Size of the cache on disk that is opened", min=1000)] = 1_000_000,
    large: Annotated[
        bool, typer.Option(help="Draft over 100 million cached tokens too (minutes, 4 GB, 1 GB of them on disk)")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw tokens per step against budget and calls seen into this PNG or SVG file")
    ] = None,
) -> None:
    """Replay recorded calls against the cache, without a model, and measure what the cache costs."""
    from rich.console import Console

    from agentspec.benchmarks.cache import run_cache
    from agentspec.benchmarks.cache_costs import measure_costs
    from agentspec.benchmarks.cache_report import print_report, write_json, write_plot
    from agentspec.recordings.traces import load_encoder

    console = Console(width=None if sys.stdout.isatty() else REPORT_WIDTH)
    require_writable(json, plot)
    with console.status("starting") as status:
        report = run_cache(
            [*data, *(more or ())],
            load_encoder(tokenizer),
            calls=calls,
            budgets=budgets,
            curve=plot is not None,
            costs=partial(measure_costs, open_tokens, large=large) if costs else None,
            progress=status.update,
        )
    print_report(report, console)
    if json:
        write_json(report, json, conditions("tokenizers", "numpy", tokenizer=str(tokenizer)))
    if plot:
        write_plot(report, plot)


@app.command()
def vllm(
    environment: Annotated[
        Path | None, typer.Option(help="Environment with vLLM, as .ci/vllm-env makes it [default: .venv-vllm]")
    ] = None,
    model: Annotated[str, typer.Option(help="Built-in name or folder")] = "smollm2-135m",
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts (at least 7)", min=7)] = None,
    controls: Annotated[int, typer.Option(help="Sampled answers of the control (at least 7)", min=7)] = 14,
    eager: Annotated[bool, typer.Option(help="Start servers without compiling, in half a minute each")] = False,
    json: Annotated[Path | None, typer.Option(help="Write every answer's figures to this file")] = None,
) -> None:
    """Ask vLLM servers with other drafters, with ours and with none the same prompts: cold, warm, after a restart."""
    from rich.console import Console

    from agentspec.backends.model_store import fetch
    from agentspec.benchmarks.vllm import Place, run_vllm
    from agentspec.benchmarks.vllm_drafting import drafting_cost
    from agentspec.benchmarks.vllm_report import print_report, write_json
    from agentspec.benchmarks.vllm_server import find_environment
    from agentspec.errors import ConfigurationError

    found = environment or find_environment()
    if found is None or not (found / "bin" / "vllm").exists():
        raise ConfigurationError("no vLLM found: run .ci/vllm-env in a checkout, or name an environment that has it")
    console = Console()
    require_writable(json)
    with console.status("drafting alone") as status:
        drafting = drafting_cost()
        place = Place(found, fetch(model).folder, ("--enforce-eager",) if eager else ())
        report = run_vllm(place, limit=limit, controls=controls, progress=status.update)
    print_report(report, drafting, console)
    if json:
        write_json(report, drafting, json, conditions(model=model, eager=str(eager)))


@app.command()
def reasoning(
    model: Annotated[
        str | None, typer.Option(help="Measure the judge's call on this local model too, e.g. smollm2-135m")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Recorded thinking (JSON lines) to predict a speed-up for", exists=True, dir_okay=False),
    ] = None,
    base_speed: Annotated[float, typer.Option(help="Tokens a second of the base model, for --replay", min=0.1)] = 25.0,
    small_speed: Annotated[float, typer.Option(help="Tokens a second of the small model", min=0.1)] = 150.0,
    score_seconds: Annotated[float, typer.Option(help="Seconds of one score", min=0)] = 0.08,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the prediction into this PNG or SVG file")] = None,
) -> None:
    """Measure what delegating steps of thinking costs, and predict what it brings (see also `reasoning calibrate`)."""
    from rich.console import Console

    from agentspec.benchmarks import reasoning as bench
    from agentspec.benchmarks.reasoning_report import print_report, write_json, write_plot

    console = Console()
    require_writable(json, plot)
    report = bench.Report()
    with console.status("the machinery") as status:
        report.figures.append(bench.overhead())
        for acceptance in (0.8, 1.0):
            status.update(f"pipelining at acceptance {acceptance:g}")
            report.figures.append(bench.pipelining(acceptance))
        if model is not None:
            from agentspec.backends.settings import TorchSettings
            from agentspec.backends.torch import TorchBackend

            status.update("the judge's call")
            report.figures.append(bench.score_cost(TorchBackend.load(TorchSettings(model=model))))
    if replay is not None:
        speeds = bench.Speeds(base_speed, small_speed, score_seconds)
        report.predictions = bench.predict(bench.read_steps(replay), speeds, [n / 10 for n in range(11)])
    print_report(report, console)
    if json:
        write_json(report, json, conditions("numpy", model=str(model)))
    if plot:
        write_plot(report, plot)


@app.command()
def traces(
    source: Annotated[Source, typer.Argument(help="Whose logs they are")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="The trace file to write, FILE.jsonl.gz")],
) -> None:
    """Turn published logs of agents into recorded calls for `agentspec bench cache`."""
    from agentspec.benchmarks.public_logs import convert

    require_writable(out)
    typer.echo(f"{convert(source, files, out)} calls written to {out}")


app.command()(bench_retrieval.retrieval)
app.command()(bench_retrieval.knn)
