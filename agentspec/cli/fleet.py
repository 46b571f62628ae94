"""`agentspec fleet` is about several servers of one model."""

from __future__ import annotations

import typer

from agentspec.cli import fleet_simulate

app = typer.Typer(help="Several servers of one model.", no_args_is_help=True)


@app.callback()
def fleet() -> None:
    """Several servers of one model."""


app.command()(fleet_simulate.simulate)
app.command()(fleet_simulate.calibrate)
