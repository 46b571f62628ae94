"""`agentspec bench` runs the measurements whose figures the documentation quotes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from agentspec.benchmarks.cache.public_logs import LogSource
from agentspec.cli.bench.publish import TORCH, publish
from agentspec.cli.common import ModelOption, plural, require_writable
from agentspec.errors import ConfigurationError

if TYPE_CHECKING:
    from agentspec.benchmarks.report import Progress

T = TypeVar("T")
app = typer.Typer(help="Measure speed-ups on this machine.", no_args_is_help=True)


class Prompts(StrEnum):
    edit = "edit"
    short = "short"
    all = "all"
    control = "control"

    @property
    def sets(self) -> list[Any]:
        """The sets of prompts to measure besides the control set, which is always measured."""
        named = {Prompts.edit: ["edit"], Prompts.short: ["edit_short"], Prompts.control: []}
        return named.get(self, ["edit", "edit_short"])


class GatewayMeasure(StrEnum):
    latency = "latency"
    throughput = "throughput"
    streams = "streams"
    overload = "overload"


@app.command()
def decode(
    model: ModelOption = "smollm2-135m",
    prompts: Annotated[
        Prompts, typer.Option(help="Code edits with long answers, with short ones, or all; or the control alone")
    ] = Prompts.all,
    limit: Annotated[
        int | None, typer.Option(help="Only the first so many prompts of each set (at least 7)", min=7)
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every run and ratio to this file")] = None,
) -> None:
    """Decode the same prompts with transformers and with agentspec off, cold and warm, interleaved in one run."""
    from agentspec.benchmarks.decode import run_decode

    run = partial(run_decode, model, sets=prompts.sets, limit=limit)
    publish(run, json, packages=TORCH, wide=False, subject={"model": model})


@app.command()
def agent(
    model: ModelOption = "smollm2-135m",
    warm: Annotated[int, typer.Option(help="Other sessions before the warm ones", min=1, max=22)] = 20,
    off: Annotated[bool, typer.Option("--off", help="Time agentspec without speculation too")] = False,
    kept: Annotated[
        bool, typer.Option("--kept", help="Time transformers with key/value rows kept between turns too")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write every answer's figures to this file")] = None,
) -> None:
    """Run whole sessions of a coding agent with transformers and with agentspec cold and warm, interleaved."""
    from agentspec.benchmarks.agent import run_agent

    run = partial(run_agent, model, warm=warm, off=off, kept=kept)
    publish(run, json, packages=TORCH, wide=False, subject={"model": model})


@app.command()
def tools(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", exists=True, dir_okay=False)],
    read_only: Annotated[list[str] | None, typer.Option(help="Patterns of tools that may run early")] = None,
    share: Annotated[float, typer.Option(help="The share of the time that tools take", min=0.01, max=0.99)] = 0.5,
    json: Annotated[Path | None, typer.Option(help="Write every file's figures to this file")] = None,
) -> None:
    """Predict the tool calls of recorded sessions, and compute what early starts would save."""
    from agentspec.benchmarks.agent_tools.computed import READ_ONLY, run_agent_tools

    publish(partial(run_agent_tools, files, read_only=read_only or READ_ONLY, share=share), json)


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
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file")] = None,
) -> None:
    """Replay recorded calls against the cache, without a model, and measure what the cache costs."""
    from agentspec.benchmarks.cache.costs import measure_costs
    from agentspec.benchmarks.cache.replay import run_cache
    from agentspec.recordings.traces import load_encoder

    run = partial(
        run_cache,
        [*data, *(more or ())],
        load_encoder(tokenizer),
        calls=calls,
        budgets=budgets,
        costs=partial(measure_costs, open_tokens) if costs else None,
    )
    packages = ("tokenizers", "numpy")
    publish(run, json, packages=packages, subject={"tokenizer": str(tokenizer)})


@app.command()
def gateway(
    measure: Annotated[
        list[GatewayMeasure] | None, typer.Option(help="Only this measure; may be given several times [default: all]")
    ] = None,
    runs: Annotated[int, typer.Option(help="Repetitions, whose medians are shown", min=1)] = 1,
    calls: Annotated[
        int | None, typer.Option(help="Calls at each number of connections [default: 20000]", min=100)
    ] = None,
    connections: Annotated[str | None, typer.Option(help="Numbers of connections [default: 16,64]")] = None,
    streams: Annotated[int | None, typer.Option(help="Streams at once [default: 1000]", min=1, max=20_000)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes where none are given: half a minute")] = False,
    json: Annotated[Path | None, typer.Option(help="Write every run to this file")] = None,
) -> None:
    """Put load on a gateway before a scripted upstream: added latency, calls per second, processor time, overload."""
    from agentspec.benchmarks.gateway.bench import QUICK, connections_of, run_gateway
    from agentspec.benchmarks.gateway.measures import GatewayPlan

    require_writable(json)
    plan = QUICK if quick else GatewayPlan()
    plan = replace(
        plan,
        calls=calls or plan.calls,
        connections=connections_of(connections) if connections is not None else plan.connections,
        streams=streams or plan.streams,
    )
    run = partial(run_gateway, plan, measures=[one.value for one in measure or GatewayMeasure], runs=runs)
    publish(run, json, packages=("starlette", "uvicorn"))


@app.command()
def traces(
    source: Annotated[LogSource, typer.Argument(help="Whose logs they are")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="The trace file to write, FILE.jsonl.gz")],
) -> None:
    """Turn published logs of agents into recorded calls for `agentspec bench cache`."""
    from agentspec.benchmarks.cache.public_logs import convert

    require_writable(out)
    typer.echo(f"{convert(source, files, out)} calls written to {out}")


@app.command()
def retrieval(
    corpus: Annotated[Path, typer.Option(help="Documents, FILE.jsonl or .jsonl.gz", exists=True, dir_okay=False)],
    questions: Annotated[
        Path, typer.Option(help='JSON lines with "id" and "question", plain or gzip', exists=True, dir_okay=False)
    ],
    model: ModelOption = "smollm2-135m",
    encoder: Annotated[str, typer.Option(help="Embedding model, likewise")] = "minilm",
    count: Annotated[int, typer.Option(help="Questions of each case (at least 7)", min=1)] = 7,
    max_tokens: Annotated[int, typer.Option(help="Length of an answer", min=1)] = 32,
    synthetic: Annotated[int, typer.Option(help="Vectors of the large exact index; 0: left out", min=0)] = 1_000_000,
    json: Annotated[Path | None, typer.Option(help="Write every run to this file")] = None,
) -> None:
    """Answer questions by sequential and by speculative retrieval over fast and slow knowledge bases, interleaved."""
    from agentspec.benchmarks.report import MIN_PAIRS
    from agentspec.benchmarks.retrieval import bench
    from agentspec.benchmarks.retrieval.bases import Bases, read_questions

    require_writable(json)
    if count < MIN_PAIRS:
        raise typer.BadParameter(f"fewer than {MIN_PAIRS} questions say nothing", param_hint="--count")
    asked = _enough(read_questions(questions, count), questions, MIN_PAIRS)

    def measure(progress: Progress) -> Any:
        with (
            closing(bench.RetrievalBench.load(model, max_tokens, progress)) as opened,
            Bases.built(corpus, encoder, opened.loop, progress) as bases,
        ):
            return bench.run_retrieval(opened, bases, asked, synthetic=synthetic)

    publish(measure, json, packages=TORCH, subject={"model": model, "encoder": encoder})


def _enough(asked: list[T], file: Path, least: int) -> list[T]:
    """What to ask. Raises `ConfigurationError` for too few: better now than after they were measured."""
    if len(asked) < least:
        raise ConfigurationError(f"{file} holds {plural(len(asked), 'line')}, and at least {least} are needed")
    return asked
