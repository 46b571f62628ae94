from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner, Result

from agentspec.cli.common import ErrorGroup
from agentspec.errors import ConfigurationError, EngineError


def run(error: Exception) -> Result:
    app = typer.Typer(cls=ErrorGroup)

    @app.command()
    def fail() -> None:
        raise error

    @app.command()
    def other() -> None: ...

    return CliRunner().invoke(app, ["fail"])


@pytest.mark.parametrize(("error", "code"), [(ConfigurationError("set x"), 2), (EngineError("broke"), 1)])
def test_an_error_of_ours_is_one_line_without_traceback(error, code):
    result = run(error)
    assert result.exit_code == code
    assert result.stderr == f"agentspec: {error.message}\n"


def test_a_missing_extra_says_how_to_install_it():
    result = run(ModuleNotFoundError("No module named 'uvicorn.config'", name="uvicorn.config"))
    assert result.exit_code == 1
    assert result.stderr == (
        "agentspec: this command needs uvicorn.config; in a checkout of agentspec, run: pip install '.[proxy]'\n"
    )


@pytest.mark.parametrize("error", [ModuleNotFoundError("x", name="somebody_elses"), KeyError("bug")])
def test_other_errors_are_not_hidden(error):
    assert run(error).exception is error
