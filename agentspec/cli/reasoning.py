"""`agentspec reasoning` fits strategies to the user's own problems: thresholds, and a trained judge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentspec.cli.common import ConfigOption, load, require_plot, require_writable
from agentspec.errors import ConfigurationError

if TYPE_CHECKING:
    from agentspec.backends.settings import TorchSettings

app = typer.Typer(help="Choose the settings of strategies.", no_args_is_help=True)


@app.callback()
def reasoning() -> None:
    """Choose the settings of strategies."""


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help='A [models.NAME] with strategy = "specreason"')],
    problems: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", exists=True, dir_okay=False, help="Lines with problem and answer")
    ],
    thresholds: Annotated[str, typer.Option(help="Thresholds to try, separated by commas")] = "0,3,5,7,9,10",
    limit: Annotated[int | None, typer.Option(help="Only the first so many problems", min=1)] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy", min=0, max=2)] = 0.0,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of thinking and answer", min=1)] = None,
    budget_tokens: Annotated[int | None, typer.Option(help="Most tokens of thinking, a problem", min=1)] = None,
    step_tokens: Annotated[int | None, typer.Option(help="Most tokens of a step", min=1)] = None,
    reuse: Annotated[
        bool, typer.Option(help="Ask greedy models once for what several thresholds need; --no-reuse times it all live")
    ] = True,
    json: Annotated[Path | None, typer.Option(help="Write every answer's figures to this file, as they come")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the file that --json names")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy against seconds into this PNG or SVG file")] = None,
    config: ConfigOption = None,
) -> None:
    """Solve problems at several thresholds: accuracy, seconds and the base model's share at each."""
    import anyio
    from rich.console import Console

    from agentspec.calibration.curve import CurvePlan, ThresholdCurve, print_curve, write_plot
    from agentspec.calibration.measure import measure_curve, read_problems

    require_writable(json)
    require_plot(plot)
    if resume and json is None:
        raise typer.BadParameter("--resume goes on from a file: name it with --json")
    given = {"budget_tokens": budget_tokens, "step_tokens": step_tokens}
    changes = {name: value for name, value in given.items() if value is not None}
    plan = CurvePlan(model, tuple(_numbers(thresholds)), changes, temperature, max_tokens, reuse)
    curve = (
        ThresholdCurve.read(json, plan) if resume and json is not None and json.exists() else ThresholdCurve.begun(plan)
    )

    def save(measured: ThresholdCurve) -> None:
        if json is not None:
            measured.write(json)

    console = Console()
    read = read_problems(problems)[:limit]
    with console.status("starting") as status:
        anyio.run(lambda: measure_curve(load(config), curve, read, progress=status.update, save=save))
    print_curve(curve, console)
    if plot:
        write_plot(curve.points, plot)


@app.command("train-judge")
def train_judge(
    pairs: Annotated[
        Path,
        typer.Argument(
            metavar="PAIRS.jsonl", exists=True, dir_okay=False, help="Lines with prompt, accepted and rejected"
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file for judge_head, in the safetensors format")],
    model: Annotated[
        str | None, typer.Option(help="Built-in name, folder, GGUF file or model-hub id [default: smollm2-135m]")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Train for this [backends.NAME]: its model, adapter, dtype and device")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Train the judge of `strategy = "lossy_acceptance"` on answers that were accepted and rejected."""
    import anyio
    from rich.console import Console

    from agentspec.backends.torch import TorchBackend
    from agentspec.backends.torch.judge_training import read_pairs
    from agentspec.backends.torch.judge_training import train_judge as train

    require_writable(out)
    settings = _judged_backend(model, backend, config)
    read = read_pairs(pairs)
    console = Console(stderr=True)
    with console.status("loading the model"):
        loaded = TorchBackend.load(settings)

    async def run() -> None:
        try:
            with console.status("reading the pairs") as status:
                head, report = await train(loaded, read, lambda done: status.update(f"{done} of {len(read)} pairs"))
        finally:
            await loaded.aclose()
        head.save(out)
        typer.echo(
            f"{out}: learned from {report.right} right and {report.wrong} wrong tokens; of those held out,"
            f" {report.right_recall:.0%} and {report.wrong_recall:.0%} are recognised"
        )

    anyio.run(run)


def _judged_backend(model: str | None, name: str | None, config: Path | None) -> TorchSettings:
    """The settings of the model that a judge is trained for, without drafts, which training has no use for.

    Raises `ConfigurationError` for a name that is no local backend's, `typer.BadParameter` for both ways to name one.
    """
    from agentspec.backends.settings import TorchSettings

    if model is not None and name is not None:
        raise typer.BadParameter("--backend names its model itself: leave out --model")
    found = TorchSettings() if name is None else load(config).backends.get(name)
    if not isinstance(found, TorchSettings):
        raise ConfigurationError(f'--backend {name}: the configuration has no [backends.{name}] with kind = "torch"')
    without_drafts = {"max_draft_tokens": 0, "draft_model": None, "drafters": None}
    return found.model_copy(update={**without_drafts, **({} if model is None else {"model": model})})


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"thresholds are numbers separated by commas, not {text!r}") from None
