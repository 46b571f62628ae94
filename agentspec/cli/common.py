"""Shared by all commands: errors as one line, the options --config and --json, and the settings."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from agentspec.errors import AgentSpecError, ConfigurationError, doc_url, extra_of, install_advice

if TYPE_CHECKING:
    from agentspec.settings.load import Settings

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
DEFAULT_FILE = Path("agentspec.toml")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="AGENTSPEC_CONFIG", help="Configuration file [default: ./agentspec.toml]"),
]
ModelOption = Annotated[str, typer.Option(help="Built-in name, folder, GGUF file or model-hub id")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def command_group(help: str) -> typer.Typer:
    """The commands of one subject, by name also where there is but one, for which typer wants a callback. Help is plain
    text: Rich takes what stands in brackets, as defaults, for markup.
    """
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None, callback=lambda: None)


class ErrorGroup(TyperGroup):
    """Reports an `AgentSpecError` as one line on stderr, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AgentSpecError as error:
            misused = isinstance(error, ConfigurationError)  # which says itself what to change
            line = "" if misused or error.code is None else f" ({doc_url(error.code)})"
            typer.echo(f"agentspec: {error}{line}", err=True)
            raise typer.Exit(MISUSED if misused else FAILED) from None
        except KeyboardInterrupt:  # a model that loads, in a thread, would hold up the end or abort the process
            typer.echo("agentspec: interrupted", err=True)
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        except ModuleNotFoundError as error:
            if (extra := extra_of(error.name)) is None:
                raise
            typer.echo(f"agentspec: this command needs {error.name}; {install_advice(extra)}", err=True)
            raise typer.Exit(FAILED) from None


def config_file(given: Path | None) -> Path | None:
    """The configuration file: `given`, else `agentspec.toml` in the current folder if it exists."""
    return DEFAULT_FILE if given is None and DEFAULT_FILE.is_file() else given


def load(given: Path | None, overrides: Mapping[str, Any] | None = None, **options: bool) -> Settings:
    from agentspec.settings.load import load_settings

    return load_settings(config_file(given), overrides, **options)


def plural(count: int, noun: str) -> str:
    """As in "1 file" and "2 files"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def creatable(folder: Path) -> Path:
    """The callback of an option that names a folder to make or to write to, likewise. Raises `typer.BadParameter`."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{there} cannot be written to")
    return folder


def writable(path: Path | None) -> Path | None:
    """The callback of an option that names a file to write, before the command imports or measures anything. Raises
    `typer.BadParameter`.
    """
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder: name a file")
    if path is not None and not (path.absolute().parent.is_dir() and os.access(path.absolute().parent, os.W_OK)):
        raise typer.BadParameter(f"{path.parent} is not a folder that can be written to")
    return path
