"""`agentspec bench` runs the measurements whose figures the documentation quotes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from agentspec.benchmarks.cache.public_logs import LogSource
from agentspec.cli.common import FAILED, ModelOption, command_group, plural, writable
from agentspec.cli.recorded_files import Files, FormatOption, SkipOption, choose, found
from agentspec.errors import ConfigurationError
from agentspec.recordings.formats import read

if TYPE_CHECKING:
    from agentspec.benchmarks.report import BenchmarkReport, Progress

TORCH = ("torch", "transformers")  # packages whose versions go into the JSON file of what runs them
REPORT_WIDTH = 150  # columns of a table that goes to a file
R = TypeVar("R", bound="BenchmarkReport")
app = command_group("Measure speed-ups on this machine.")
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every figure to this file", callback=writable)]
TracesOption = Annotated[
    list[Path] | None, typer.Option(help="Recorded calls to force as answers", exists=True, dir_okay=False)
]
TokenizerOption = Annotated[
    Path | None, typer.Option(help="Folder with a ChatML tokenizer.json, for --traces", exists=True, file_okay=False)
]
ShapeOption = Annotated[Literal["tiny", "1b", "3b", "8b"], typer.Option(help="Sizes of the random model")]
LearnedOption = Annotated[int, typer.Option(help="Calls of each file that are learned, not timed", min=0)]


def publish(
    measure: Callable[..., R],
    json: Path | None,
    *,
    packages: Sequence[str] = (),
    wide: bool = True,
    subject: Mapping[str, str] | None = None,
) -> R:
    """Call `measure(progress=...)`, print its report, and write the requested files, with `conditions` in the JSON."""
    from rich.console import Console

    from agentspec.benchmarks.report import conditions, print_report, write_json

    console = Console(width=REPORT_WIDTH if wide and not sys.stdout.isatty() else None)
    with console.status("starting") as status:
        report = measure(progress=status.update)
    print_report(report, console)
    if json:
        write_json(report, json, conditions(*packages, **(subject or {})))
    return report


class GatewayMeasure(StrEnum):
    latency = "latency"
    throughput = "throughput"
    streams = "streams"
    overload = "overload"


@app.command()
def decode(
    model: ModelOption = "smollm2-135m",
    prompts: Annotated[
        Literal["edit", "edit_short", "control"], typer.Option(help="control: questions whose answers repeat nothing")
    ] = "edit",
    limit: Annotated[int, typer.Option(help="Only the first prompts of the set", min=7)] = 7,
    json: JsonFile = None,
) -> None:
    """Decode the same prompts with transformers and with agentspec off, cold and warm, interleaved in one run.

    Seven prompts take some minutes on two cores. There are 14; of short edits 12.
    """
    from agentspec.benchmarks.decode import run_decode

    run = partial(run_decode, model, prompts=prompts, limit=limit)
    publish(run, json, packages=TORCH, wide=False, subject={"model": model})


@app.command()
def agent(
    model: ModelOption = "smollm2-135m",
    turns: Annotated[int, typer.Option(help="Model calls of a session", min=1, max=8)] = 3,
    warm: Annotated[int, typer.Option(help="Other sessions before the warm ones", min=1, max=22)] = 20,
    off: Annotated[bool, typer.Option("--off", help="Time agentspec without speculation too")] = False,
    kept: Annotated[bool, typer.Option("--kept", help="Time transformers that keep key/value rows too")] = False,
    json: JsonFile = None,
) -> None:
    """Run sessions of a coding agent with transformers and with agentspec cold and warm, interleaved.

    Sessions of three turns take some minutes on two cores, of eight turns three times as long.
    """
    from agentspec.benchmarks.agent import run_agent

    run = partial(run_agent, model, turns=turns, warm=warm, off=off, kept=kept)
    publish(run, json, packages=TORCH, wide=False, subject={"model": model})


@app.command()
def tools(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", exists=True, dir_okay=False)],
    read_only: Annotated[list[str] | None, typer.Option(help="Patterns of tools that may run early")] = None,
    share: Annotated[float, typer.Option(help="The share of the time that tools take", min=0.01, max=0.99)] = 0.5,
    json: JsonFile = None,
) -> None:
    """Predict the tool calls of recorded sessions, and compute what early starts would save."""
    from agentspec.benchmarks.agent_tools.replay import READ_ONLY, run_agent_tools

    publish(partial(run_agent_tools, files, read_only=read_only or READ_ONLY, share=share), json)


@app.command()
def cache(
    data: Annotated[list[Path], typer.Option(help="Recorded calls, FILE.jsonl.gz", exists=True, dir_okay=False)],
    tokenizer: Annotated[Path, typer.Option(help="Folder with a ChatML tokenizer.json", exists=True, file_okay=False)],
    more: Annotated[list[Path] | None, typer.Argument(metavar="FILE", exists=True, dir_okay=False)] = None,
    calls: Annotated[int, typer.Option(help="Only the first so many calls of each file", min=1)] = 600,
    budgets: Annotated[tuple[int, int], typer.Option(help="Most drafted tokens a step, two values", min=1)] = (8, 32),
    costs: Annotated[bool, typer.Option(help="Measure times and sizes too, over a million tokens")] = True,
    open_tokens: Annotated[int, typer.Option(help="Size of the cache on disk that is opened", min=1000)] = 1_000_000,
    json: JsonFile = None,
) -> None:
    """Replay recorded calls against the cache, without a model, and measure what the cache costs."""
    from agentspec.benchmarks.cache.replay import run_cache
    from agentspec.benchmarks.traces import load_encoder

    run = partial(
        run_cache,
        [*data, *(more or ())],
        load_encoder(tokenizer),
        calls=calls,
        budgets=budgets,
        open_tokens=open_tokens if costs else None,
    )
    packages = ("tokenizers", "numpy")
    publish(run, json, packages=packages, subject={"tokenizer": str(tokenizer)})


@app.command()
def rollouts(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Recorded samples, JSON lines", dir_okay=False)],
    problems: Annotated[
        list[Path] | None, typer.Option(help='Sample these first: JSON lines, "id" and "problem"', exists=True)
    ] = None,
    model: ModelOption = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="In which the model samples: auto, float32, bfloat16")] = "auto",
    count: Annotated[int, typer.Option(help="Problems that are sampled", min=1)] = 16,
    samples: Annotated[int, typer.Option(help="Samples of a problem in an epoch", min=2)] = 8,
    epochs: Annotated[int, typer.Option(help="Epochs", min=2, max=4)] = 4,
    temperature: Annotated[float, typer.Option(help="Of the first epoch's samples", min=0.1)] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a sample", min=1)] = 200,
    budgets: Annotated[tuple[int, int], typer.Option(help="Most drafted tokens a step, two values", min=1)] = (8, 32),
    batch: Annotated[int, typer.Option(help="Samples that run together", min=1)] = 64,
    json: JsonFile = None,
) -> None:
    """Replay samples of the same prompts, epoch after epoch, as a trainer asks for them, recorded here or before."""
    from agentspec.benchmarks.rollouts.bench import run_rollouts
    from agentspec.benchmarks.rollouts.recording import read_problems, record

    def measure(progress: Progress) -> Any:
        if problems:
            from agentspec.backends.settings import TorchSettings
            from agentspec.backends.torch import TorchBackend

            progress(f"loading {model}")
            backend = TorchBackend.load(TorchSettings(model=model, dtype=dtype))
            asked = read_problems(problems, count)
            sample = partial(record, backend, asked, file, size=samples, epochs=epochs, temperature=temperature)
            sample(max_tokens=max_tokens, progress=progress)
        return run_rollouts(file, size=samples, epochs=epochs, budgets=budgets, batch=batch, progress=progress)

    publish(measure, json, packages=("numpy",), subject={"model": model})


@app.command()
def gateway(
    measure: Annotated[list[GatewayMeasure] | None, typer.Option(help="Only these measures [default: all]")] = None,
    runs: Annotated[int, typer.Option(help="Repetitions, whose medians are shown", min=1)] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: half a minute")] = False,
    json: JsonFile = None,
) -> None:
    """Put load on a gateway before a scripted upstream: added latency, calls per second, processor time, overload."""
    from agentspec.benchmarks.gateway.bench import QUICK, GatewayPlan, run_gateway

    plan = QUICK if quick else GatewayPlan()
    run = partial(run_gateway, plan, measures=[one.value for one in measure or GatewayMeasure], runs=runs)
    publish(run, json, packages=("starlette", "uvicorn"))


@app.command()
def traces(
    source: Annotated[LogSource, typer.Argument(metavar="SOURCE", help="Which project's logs they are")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="The trace file to write, FILE.jsonl.gz", callback=writable)],
) -> None:
    """Turn published logs of agents into recorded calls for `agentspec bench cache`."""
    from agentspec.benchmarks.cache.public_logs import convert

    typer.echo(f"{convert(source, files, out)} calls written to {out}")


@app.command()
def retrieval(
    corpus: Annotated[Path, typer.Option(help="Documents, FILE.jsonl or .jsonl.gz", exists=True, dir_okay=False)],
    questions: Annotated[Path, typer.Option(help='JSON lines, "id" and "question"', exists=True, dir_okay=False)],
    model: ModelOption = "smollm2-135m",
    encoder: Annotated[str, typer.Option(help="Embedding model, likewise")] = "minilm",
    count: Annotated[int, typer.Option(help="Questions of each case (at least 7)", min=1)] = 7,
    max_tokens: Annotated[int, typer.Option(help="Length of an answer", min=1)] = 32,
    synthetic: Annotated[int, typer.Option(help="Vectors of the large exact index; 0: left out", min=0)] = 1_000_000,
    json: JsonFile = None,
) -> None:
    """Answer questions by sequential and by speculative retrieval over fast and slow knowledge bases, interleaved."""
    from agentspec.benchmarks.report import MIN_PAIRS
    from agentspec.benchmarks.retrieval import bench
    from agentspec.benchmarks.retrieval.bases import Bases, read_questions

    if count < MIN_PAIRS:
        raise typer.BadParameter(f"at least {MIN_PAIRS} questions are needed", param_hint="--count")
    asked = read_questions(questions, count)
    if len(asked) < MIN_PAIRS:
        held = plural(len(asked), "line")
        raise ConfigurationError(f"{questions} holds {held}, and at least {MIN_PAIRS} are needed")

    def measure(progress: Progress) -> Any:
        with (
            closing(bench.RetrievalBench.load(model, max_tokens, progress)) as opened,
            Bases.built(corpus, encoder, opened.loop, progress) as bases,
        ):
            return bench.run_retrieval(opened, bases, asked, synthetic=synthetic)

    publish(measure, json, packages=TORCH, subject={"model": model, "encoder": encoder})


@app.command()
def vllm(
    python: Annotated[Path | None, typer.Option(help="Interpreter with vLLM [default: of .venv-vllm]")] = None,
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="What that vLLM runs on")] = "cuda",
    shape: ShapeOption = "3b",
    variant: Annotated[list[str] | None, typer.Option(help="Drafters, as agentspec, ngram_gpu [default: all]")] = None,
    part: Annotated[list[str] | None, typer.Option(help="answers or calls; both if not given")] = None,
    traces: TracesOption = None,
    tokenizer: TokenizerOption = None,
    learned: LearnedOption = 0,
    at_once: Annotated[int, typer.Option(help="Calls that run together", min=1, max=128)] = 1,
    seconds: Annotated[float, typer.Option(help="No call begins after so much time", min=1)] = 570.0,
    start: Annotated[float, typer.Option(help="Seconds within which the engines must be ready", min=1)] = 300.0,
    json: JsonFile = None,
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
        found, device, shape, tuple(variant or ()), parts,
        tuple(traces or ()), tokenizer, learned, seconds, start, together=at_once,
    )  # fmt: skip
    if not publish(partial(run_forced, plan), json, subject={"interpreter": str(found)}).sound:
        raise typer.Exit(FAILED)


@app.command()
def gpu(
    shape: ShapeOption = "8b",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    seconds: Annotated[float, typer.Option(help="What does not fit in so much time is left out", min=1)] = 570.0,
    traces: TracesOption = None,
    tokenizer: TokenizerOption = None,
    questions: Annotated[int, typer.Option(help="Answers of each check", min=1)] = 50,
    learned: LearnedOption = 0,
    json: JsonFile = None,
) -> None:
    """Check and time the local engine on a device with random weights; exit code 1 where a check fails."""
    from agentspec.benchmarks.gpu.bench import GpuPlan, run_gpu

    if bool(traces) != (tokenizer is not None):
        raise typer.BadParameter("--traces and --tokenizer go together")
    plan = GpuPlan(shape, device, dtype, seconds, tuple(traces or ()), tokenizer, questions, learned)
    if not publish(partial(run_gpu, plan), json, packages=TORCH).sound:
        raise typer.Exit(FAILED)


@app.command()
def placement(
    files: Files,
    policy: Annotated[str, typer.Option(help="Policies, separated by commas")] = "round_robin,least_loaded,workflow",
    order: Annotated[str, typer.Option(help="Orders of waiting calls: arrival, deadline")] = "arrival",
    engines: Annotated[int, typer.Option(help="Engines", min=1)] = 10,
    sessions: Annotated[int, typer.Option(help="Sessions that arrive, drawn from the recorded ones", min=1)] = 5000,
    rate: Annotated[float, typer.Option(help="Sessions that arrive in a second", min=0.0001)] = 1.0,
    seeds: Annotated[int, typer.Option(help="Runs of each, with other arrivals", min=1)] = 5,
    scenario: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="JSON: other parameters")] = None,
    format_: FormatOption = None,
    skip_bad: SkipOption = False,
    json: JsonFile = None,
) -> None:
    """Replay recorded sessions on simulated engines, and compare where their calls go and which is next."""
    from rich.console import Console

    from agentspec.benchmarks.placement.report import print_comparison, write_json
    from agentspec.benchmarks.placement.scenario import Scenario
    from agentspec.benchmarks.placement.simulate import compare, require_room
    from agentspec.benchmarks.placement.workload import shapes

    errors = Console(stderr=True)
    named = [{"policy": one, "order": other} for one in policy.split(",") for other in order.split(",")]
    tried = [Scenario.read(scenario, engines=engines, sessions=sessions, rate=rate, **one) for one in named]
    on_bad, _ = choose(skip_bad, errors)
    recorded = shapes({str(file): read(file, format_, on_bad) for file in found(files, errors)})
    require_room(tried[0], recorded)
    with errors.status("starting") as status:
        tell = status.update if errors.is_terminal else errors.print  # in a log a status shows nothing, for minutes
        comparison = compare(tried[0], recorded, [(one.policy, one.order) for one in tried], seeds, tell)
    print_comparison(comparison, Console(width=None if sys.stdout.isatty() else REPORT_WIDTH))
    if json is not None:
        write_json(comparison, json)
