"""`agentspec bench retrieval` and `knn`: speculative retrieval against sequential, the same answers."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from agentspec.cli.common import FAILED, REPORT_WIDTH, conditions, require_writable
from agentspec.cli.knn import DistanceOption, NeighboursOption, WeightOption, settings_of


def retrieval(
    corpus: Annotated[Path, typer.Option(help="Documents, FILE.jsonl or .jsonl.gz", exists=True, dir_okay=False)],
    questions: Annotated[
        Path, typer.Option(help='JSON lines with "id" and "question", plain or gzip', exists=True, dir_okay=False)
    ],
    model: Annotated[str, typer.Option(help="Built-in name, folder, GGUF file or model-hub id")] = "smollm2-135m",
    encoder: Annotated[str, typer.Option(help="Embedding model, likewise")] = "minilm",
    count: Annotated[int, typer.Option(help="Questions of each case (at least 7)", min=1)] = 7,
    max_tokens: Annotated[int, typer.Option(help="Length of an answer", min=1)] = 32,
    synthetic: Annotated[int, typer.Option(help="Vectors of the large exact index; 0: left out", min=0)] = 1_000_000,
    sweep: Annotated[int, typer.Option(help="Questions at each delay from 1 ms to 1 s; 0: none", min=0)] = 2,
    check: Annotated[
        bool, typer.Option("--check", help="Only compare answers, over every knowledge base and in every way")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write every run to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speed-up against delay into this PNG or SVG file")] = None,
) -> None:
    """Answer questions by sequential and by speculative retrieval over fast and slow knowledge bases, interleaved.

    With --check, exit code 1 where an answer differs from sequential retrieval's.
    """
    from rich.console import Console

    from agentspec.benchmarks import retrieval as bench
    from agentspec.benchmarks.retrieval_bases import Bases, read_questions
    from agentspec.benchmarks.retrieval_report import print_check, print_report, write_json, write_plot
    from agentspec.benchmarks.stats import MIN_PAIRS

    console = Console(width=None if sys.stdout.isatty() else REPORT_WIDTH)
    require_writable(json, plot)
    if not check and count < MIN_PAIRS:
        raise typer.BadParameter(f"fewer than {MIN_PAIRS} questions say nothing", param_hint="--count")
    asked = read_questions(questions, count)
    with (
        console.status("starting") as status,
        closing(bench.Bench.load(model, max_tokens, status.update)) as opened,
        Bases.built(corpus, encoder, opened.loop, status.update) as bases,
    ):
        if check:
            found = bench.check(opened, bases, asked)
            print_check(found, console)
            raise typer.Exit(FAILED if found.differ else 0)
        report = bench.run_retrieval(opened, bases, asked, synthetic=synthetic, sweep=sweep)
    print_report(report, console)
    if json:
        write_json(report, json, conditions("torch", "transformers", model=model, encoder=encoder))
    if plot and report.points:
        write_plot(report, plot)


def knn(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Datastore, as knn build makes it")],
    prompts: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", exists=True, dir_okay=False, help="Lines with a question or text")
    ],
    model: Annotated[str, typer.Option(help="The model that the datastore was built with")] = "smollm2-135m",
    limit: Annotated[int, typer.Option(help="Only the first so many prompts (at least 7)", min=7)] = 20,
    max_tokens: Annotated[int, typer.Option(help="Length of an answer", min=1)] = 48,
    sampled: Annotated[bool, typer.Option(help="Draw at temperature 1 with a seed instead of greedily")] = False,
    neighbours: NeighboursOption = None,
    weight: WeightOption = None,
    distance: DistanceOption = None,
    json: Annotated[Path | None, typer.Option(help="Write every run and ratio to this file")] = None,
) -> None:
    """Answer the same prompts by KNN-LM without and with speculative retrieval, interleaved in one run."""
    from rich.console import Console

    from agentspec.benchmarks.knn import read_prompts, run_knn
    from agentspec.benchmarks.knn_report import print_table, write_json
    from agentspec.types import SamplingParams

    console = Console(width=None if sys.stdout.isatty() else REPORT_WIDTH)
    require_writable(json)
    knobs = settings_of(neighbours, weight, distance)
    sampling = SamplingParams(temperature=float(sampled), seed=1, max_tokens=max_tokens)
    with console.status("starting") as status:
        table = run_knn(model, folder, read_prompts(prompts, limit), sampling, knobs, status.update)
    print_table(table, console)
    if json:
        write_json(table, json, conditions("torch", "numpy", model=model, **{k: str(v) for k, v in knobs}))
