"""`agentspec reasoning eval` measures a strategy that delegates thinking on problems whose answers are known."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentspec.cli.common import FAILED, ConfigOption, JsonOption, command_group, load, plural, print_json
from agentspec.errors import ConfigurationError

if TYPE_CHECKING:
    from agentspec.benchmarks.reasoning.evaluation import GradedAnswer, Problem
    from agentspec.reasoning.settings import DelegationSettings
    from agentspec.settings.load import Settings

app = command_group("Measure strategies that delegate thinking.")


@app.command("eval")
def evaluate(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False)],
    config: ConfigOption = None,
    model: Annotated[str | None, typer.Option(help="The strategy's model, unless there is but one")] = None,
    prompt: Annotated[
        Literal["boxed", "newlines", "gpqa"] | None,
        typer.Option(
            help="A line that asks for a box, or SpecReason's words", show_default="newlines, gpqa for choices"
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Answers of each to every problem", min=1)] = 1,
    limit: Annotated[int | None, typer.Option(help="Only the first so many problems", min=1)] = None,
    thresholds: Annotated[str | None, typer.Option(help="SpecReason at each of these, as 5,7,9")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest thinking and answer together", min=1)] = None,
    at_once: Annotated[int, typer.Option(help="Answers at the same time, which share the machine", min=1)] = 1,
    json: JsonOption = False,
) -> None:
    """Answer AIME, MATH or GPQA problems by the base model, the small model and the strategy, and grade the answers.

    A line has a problem or question, and an answer, a solution that boxes it, or choices. Ctrl-C keeps the answers.
    """
    import anyio

    from agentspec.benchmarks.reasoning import evaluation
    from agentspec.cli.recorded_files import progress
    from agentspec.runtime import Runtime
    from agentspec.types import GenerateRequest, SamplingParams

    settings = load(config)
    name, strategy = _strategy(settings, model)
    arms = evaluation.arms_of(name, strategy, _numbers(thresholds))
    problems = _problems(file, limit)
    named = {label: f"eval {at}" for at, label in enumerate(arms)}
    models = settings.models | {named[label]: arm for label, arm in arms.items()}
    sampling = SamplingParams(
        max_tokens=max_tokens
    )  # nothing is stored: one arm's answers would be drafts of another's
    requests = {label: GenerateRequest(named[label], messages=(), sampling=sampling, store=False) for label in arms}
    answers, total = list[evaluation.GradedAnswer](), len(arms) * len(problems) * samples

    def answered(one: GradedAnswer) -> None:
        answers.append(one)
        advance("answers", 1)

    async def run() -> None:
        runtime = Runtime(settings.model_copy(update={"models": models}))
        try:
            await anyio.to_thread.run_sync(runtime.start)
            console.print(f"models ready; {total} answers follow", highlight=False)
            advance("answers", 0, total=total)
            given = {"prompt": prompt, "samples": samples, "at_once": at_once}
            await evaluation.evaluate(requests, runtime.generate, problems, **given, answered=answered)  # type: ignore[arg-type]
        finally:
            await runtime.aclose()

    with progress() as (console, advance), suppress(KeyboardInterrupt):
        anyio.run(run)
    _report(file, list(arms), answers, total, json)
    if len(answers) < total or all(one.error for one in answers):
        raise typer.Exit(FAILED)


def _strategy(settings: Settings, model: str | None) -> tuple[str, DelegationSettings]:
    """The model to measure and its settings. Raises `ConfigurationError` if that is none, or one of several."""
    from agentspec.reasoning.settings import DelegationSettings

    found = {name: one for name, one in settings.models.items() if isinstance(one, DelegationSettings)}
    listed = ", ".join(found) or "none is configured; docs/strategies.md has a configuration to begin with"
    if model is None and len(found) != 1:
        raise ConfigurationError(f"name the model to measure by --model: {listed}")
    name = model or next(iter(found))
    if name not in found:
        raise ConfigurationError(f"{name!r} is no model of a strategy that delegates thinking: {listed}")
    return name, found[name]


def _numbers(given: str | None) -> list[float]:
    try:
        return [float(one) for one in given.split(",")] if given else []
    except ValueError:
        raise typer.BadParameter("numbers separated by commas, as 5,7,9", param_hint="--thresholds") from None


def _problems(file: Path, limit: int | None) -> list[Problem]:
    """The problems of a file, plain or gzip. Raises `ConfigurationError` for a line that is none, and without any."""
    from agentspec.benchmarks.reasoning.evaluation import Problem
    from agentspec.recordings.calls import BadLineError, json_object, lines

    problems = []
    for place, line in islice(lines(file), limit):
        try:
            problems.append(Problem.read(json_object(line, place)))
        except ValueError as error:
            raise BadLineError(place, str(error)) from None
    if not problems:
        raise ConfigurationError(f"{file} holds no problems")
    return problems


def _report(file: Path, arms: Sequence[str], answers: Sequence[GradedAnswer], total: int, json: bool) -> None:
    """Print a table with a row for each arm, or all figures as JSON."""
    from rich.console import Console

    from agentspec.benchmarks.reasoning.evaluation import Summary
    from agentspec.benchmarks.report import conditions, table

    rows = [Summary.of(arm, answers) for arm in arms]
    if json:
        given = {"answers": [asdict(one) for one in answers], "complete": len(answers) == total}
        print_json({"environment": conditions(file=str(file)), "summary": [asdict(one) for one in rows], **given})
        return
    columns = ("variant", "answers", "right [95 %]", "tokens", "seconds", "delegated")
    shown = [
        (
            one.arm,
            f"{one.answers}" + (f", {one.failed} failed" if one.failed else ""),
            f"{one.accuracy:.1%} [{one.low:.0%}, {one.high:.0%}]" if one.answers else "-",
            f"{one.tokens:.0f}",
            f"{one.seconds:.1f}",
            f"{one.delegated:.0%}",
        )
        for one in rows
    ]
    Console().print(table(f"{file.name}: {len(answers)} of {plural(total, 'answer')}", columns, shown))
    if error := next((one.error for one in answers if one.error), None):
        typer.echo(f"the first that failed: {error}", err=True)
