"""The `agentspec` program. Each command imports its modules when it runs, so that `--help` is quick."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from agentspec.cli import bench, cache, config, demo, kb, launch, model, reasoning, serve, top, trace, verify
from agentspec.cli.common import ErrorGroup

app = typer.Typer(
    name="agentspec",
    cls=ErrorGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Makes agent workflows faster without changing their output.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.",
)


def _print_version(value: bool) -> None:
    if value:
        from agentspec import __version__

        typer.echo(f"agentspec {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may hold what the terminal's encoding cannot
        sys.stdout.reconfigure(errors="backslashreplace")


app.command(context_settings={"allow_extra_args": True})(serve.serve)
app.command()(launch.launch)
app.command()(top.top)
app.command()(demo.demo)
app.add_typer(bench.app, name="bench")
app.add_typer(model.app, name="model")
app.add_typer(cache.app, name="cache")
app.add_typer(config.app, name="config")
app.add_typer(trace.app, name="trace")
app.add_typer(kb.app, name="kb")
app.add_typer(kb.knn, name="knn")
app.add_typer(reasoning.app, name="reasoning")
app.command()(config.doctor)
app.command()(verify.verify)
