"""`agentspec cache`: what the token cache holds, and making it forget."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentspec.cli.common import ConfigOption, JsonOption, load, print_json

if TYPE_CHECKING:
    from agentspec.config import Settings

_FORGET_MEMORY = 1 << 20  # bytes; forgetting needs the database, not the index

app = typer.Typer(help="Look into the token cache, or make it forget.", no_args_is_help=True)

PathOption = Annotated[Path | None, typer.Option(help="The cache's folder [default: cache.path]")]


@app.callback()
def cache() -> None:
    """Look into the token cache, or make it forget."""


@app.command()
def stats(config: ConfigOption = None, path: PathOption = None, json: JsonOption = False) -> None:
    """Print how much the cache on disk holds. It may be in use by a server meanwhile."""
    from agentspec.cache import SuffixCache

    with SuffixCache.open(_folder(load(config), path), mode="follower") as opened:
        values = asdict(opened.stats())
    if json:
        print_json(values)
        return
    for name, value in values.items():
        typer.echo(f"{name:<16} {value}")


@app.command()
def forget(
    session: Annotated[str | None, typer.Option(help="Outputs of this session")] = None,
    tenant: Annotated[str | None, typer.Option(help="Outputs of this tenant, with every model")] = None,
    older_than: Annotated[str | None, typer.Option(help="Outputs older than this, such as 30d, 12h or 90m")] = None,
    text: Annotated[str | None, typer.Option(help="Outputs that hold this text; - reads it from stdin")] = None,
    model: Annotated[str | None, typer.Option(help="The model whose outputs are searched for --text")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: ConfigOption = None,
    path: PathOption = None,
    json: JsonOption = False,
) -> None:
    """Forget what all the options given hold for, on disk and in the servers that use the folder. For good."""
    from agentspec.cache import SuffixCache

    settings = load(config)
    folder = _folder(settings, path)
    conditions = _conditions(session, tenant, older_than) | _search(settings, text, model)
    described = _describe(session, tenant, older_than, model)
    if not yes:
        typer.confirm(f"Forget in {folder}: {described}? It cannot be undone.", abort=True, err=True)
    with SuffixCache.open(folder, mode="follower", memory_bytes=_FORGET_MEMORY) as opened:
        forgotten = opened.forget(**conditions)
        left = opened.stats().disk_bytes
    if json:
        print_json({"forgotten": forgotten, "disk_bytes": left})
        return
    typer.echo(f"forgot {forgotten} sequence{'' if forgotten == 1 else 's'}: {described}")
    typer.echo(f"The database now takes {left} bytes. Servers that use it drop what went within seconds;")
    typer.echo("backups, logs and upstream servers keep what they have: see docs/cache.md, Forgetting.")


def _folder(settings: Settings, path: Path | None) -> Path:
    from agentspec.errors import ConfigurationError

    folder = settings.cache.path if path is None else path.expanduser()
    if folder is None:
        raise ConfigurationError("the cache is in memory only; set cache.path or give --path")
    if not folder.is_dir():
        raise ConfigurationError(f"there is no cache at {str(folder)!r}; a server with this cache.path creates it")
    return folder


def _conditions(session: str | None, tenant: str | None, older_than: str | None) -> dict[str, Any]:
    from agentspec.cache.settings import parse_span
    from agentspec.errors import ConfigurationError

    try:
        values = {"session": session, "tenant": tenant, "older_than": parse_span(older_than)}
    except ValueError as error:
        raise ConfigurationError(f"--older-than: {error}") from None
    return {name: value for name, value in values.items() if value is not None}


def _search(settings: Settings, text: str | None, model: str | None) -> dict[str, Any]:
    """What to search for: the text, as the tokenizer of a configured model or of a model reference reads it."""
    from agentspec.errors import ConfigurationError

    if text is None and model is None:
        return {}
    if text is None or model is None:
        raise ConfigurationError("--text and --model go together: a model's own tokenizer tells what its tokens say")
    from agentspec.backends.torch.codec import Codec
    from agentspec.backends.torch.loader import load_tokenizer

    tokenizer, tokenizer_hash = load_tokenizer(_reference(settings, model))
    wanted = typer.get_text_stream("stdin").read().rstrip("\n") if text == "-" else text
    return {"text": wanted, "decode": Codec(tokenizer).decode, "tokenizer": tokenizer_hash}


def _describe(session: str | None, tenant: str | None, older_than: str | None, model: str | None) -> str:
    from agentspec.errors import ConfigurationError

    words = {
        f"session {session!r}": session,
        f"tenant {tenant!r}": tenant,
        f"older than {older_than}": older_than,
        f"holding the text, from models with the tokenizer of {model}": model,
    }
    described = ", ".join(said for said, value in words.items() if value is not None)
    if not described:
        raise ConfigurationError("say what to forget: --session, --tenant, --older-than or --text with --model")
    return described


def _reference(settings: Settings, name: str) -> str:
    """The model reference behind a configured model or backend name; any other name is one itself."""
    from agentspec.backends.settings import TorchSettings

    backend = settings.models[name].backend if name in settings.models else name
    found = settings.backends.get(backend)
    return found.model if isinstance(found, TorchSettings) else name
