"""`agentspec cache` shows and checks what the token cache holds, and deletes from it or shrinks it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentspec.cli import cache_files
from agentspec.cli.cache_files import PathOption, folder_of, reference_of, shown
from agentspec.cli.common import FAILED, ConfigOption, JsonOption, load, plural, print_json
from agentspec.errors import AgentSpecError, ConfigurationError

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache
    from agentspec.settings.load import Settings

_ERASURE_SECONDS = 60.0  # how long `forget` waits for others to let what it deleted be erased
_FORGET_MEMORY = 1 << 20  # bytes; deleting needs the database, not the index

app = typer.Typer(help="Look into the token cache, fill it, look after it, or make it forget.", no_args_is_help=True)


@app.command()
def stats(config: ConfigOption = None, path: PathOption = None, json: JsonOption = False) -> None:
    """Print how much the cache on disk holds. It may be in use by a server meanwhile."""
    from agentspec.cache import SuffixCache

    with SuffixCache.open(folder_of(load(config), path), mode="follower") as opened:
        values = asdict(opened.stats())
    if json:
        print_json(values)
        return
    for name, value in values.items():
        typer.echo(f"{name:<16} {f'{value:.2f}' if isinstance(value, float) else value}")


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
    folder = folder_of(settings, path)
    conditions = _conditions(session, tenant, older_than) | _search(settings, text, model)
    described = _describe(session, tenant, older_than, model)
    if not yes:
        typer.confirm(f"Forget in {shown(folder)}: {described}? It cannot be undone.", abort=True, err=True)
    with SuffixCache.open(folder, mode="follower", memory_bytes=_FORGET_MEMORY) as opened:
        forgotten = opened.forget(**conditions)
        erased = _wait_for_erasure(opened)
        left = opened.stats().disk_bytes
    if json:
        print_json({"forgotten": forgotten, "disk_bytes": left, "erased": erased})
    else:
        typer.echo(f"forgot {plural(forgotten, 'sequence')}: {described}")
    if not erased:
        typer.echo(
            f"error: deleted, but bytes may still be in {shown(folder)}: end what reads it, or make room on the disk."
            " A server that uses it erases them then; without one, run `agentspec cache compact`",
            err=True,
        )
        raise typer.Exit(FAILED)
    if json:
        return
    typer.echo(f"The database now takes {left} bytes. Servers that use it drop what went within seconds;")
    typer.echo("backups, logs and upstream servers keep what they have: see docs/cache.md, Forgetting.")


def _wait_for_erasure(opened: SuffixCache) -> bool:
    """Wait until no byte of what was deleted is left, which the cache's own thread tries again and again."""
    until = time.monotonic() + _ERASURE_SECONDS
    if opened.stats().erasure_pending:
        typer.echo(f"deleted; waiting up to {_ERASURE_SECONDS:g} s until nobody reads the files", err=True)
    while opened.stats().erasure_pending:
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)
    return True


def _conditions(session: str | None, tenant: str | None, older_than: str | None) -> dict[str, Any]:
    from agentspec.cache.settings import parse_span

    try:
        values = {"session": session, "tenant": tenant, "older_than": parse_span(older_than)}
    except ValueError as error:
        raise ConfigurationError(f"--older-than: {error}") from None
    return {name: value for name, value in values.items() if value is not None}


def _search(settings: Settings, text: str | None, model: str | None) -> dict[str, Any]:
    """The text to search for, and the tokenizer of a configured model or of a model reference that decodes tokens."""
    if text is None and model is None:
        return {}
    if text is None or model is None:
        raise ConfigurationError("--text and --model go together: a model's own tokenizer tells what its tokens say")
    from agentspec.backends.torch.text.model_text import load_tokenizer
    from agentspec.backends.torch.text.tokenizer import TokenizerAdapter

    tokenizer, tokenizer_hash = load_tokenizer(reference_of(settings, model))
    wanted = typer.get_text_stream("stdin").read().rstrip("\n") if text == "-" else text
    return {"text": wanted, "decode": TokenizerAdapter(tokenizer).decode, "tokenizer": tokenizer_hash}


def _describe(session: str | None, tenant: str | None, older_than: str | None, model: str | None) -> str:
    words = {
        f"session {session!r}": session,
        f"tenant {tenant!r}": tenant,
        f"older than {older_than}": older_than,
        f"holding the text, from models with the tokenizer of {model}": model,
    }
    described = ", ".join(what for what, value in words.items() if value is not None)
    if not described:
        raise ConfigurationError("say what to forget: --session, --tenant, --older-than or --text with --model")
    return described


app.command("import")(cache_files.import_files)


@app.command()
def verify(config: ConfigOption = None, path: PathOption = None, json: JsonOption = False) -> None:
    """Check the database, every sequence and the index built from them; exit code 1 if something is wrong.

    Changes nothing. A server may use the folder meanwhile.
    """
    from rich.console import Console

    settings = load(config)
    folder = folder_of(settings, path)
    with Console(stderr=True).status("starting") as status:
        memory = int(settings.cache.memory_bytes)
        problems = problems_of(folder, memory, lambda stage: status.update(f"the {stage}"))
    if json:
        print_json({"ok": not problems, "problems": problems})
    else:
        typer.echo("\n".join(problems) or f"ok: {shown(folder)}")
    if problems:
        raise typer.Exit(FAILED)


def problems_of(
    folder: Path | str, memory_bytes: int, progress: Callable[[str], None] = lambda stage: None
) -> list[str]:
    """The problems found, one line each; empty for a sound cache. Read-only; other processes may use the folder.

    The index that is checked holds the newest sequences that fit into `memory_bytes`, as a server's would. It is not
    checked if the database is damaged.
    """
    from agentspec.cache import SuffixCache
    from agentspec.cache.storage.sequence_store import SequenceStore

    try:
        progress("database")
        with closing(SequenceStore.open(folder, disk_bytes=None, mode="follower")) as store:
            if problems := list(store.problems()):
                return problems
        progress("index")
        with SuffixCache.open(folder, mode="follower", memory_bytes=memory_bytes) as cache:
            cache.check_integrity()
    except AgentSpecError as error:
        return [str(error)]
    return []


@app.command()
def compact(config: ConfigOption = None, path: PathOption = None, json: JsonOption = False) -> None:
    """Give back what the cache on disk does not need. Refused while a server writes to the folder."""
    from agentspec.cache import SuffixCache

    settings = load(config)
    folder = folder_of(settings, path)
    with SuffixCache.open(folder, mode="writer") as opened:
        before, after = opened.stats().disk_bytes, opened.compact()
    if json:
        print_json({"before": before, "disk_bytes": after})
        return
    typer.echo(f"{shown(folder)} takes {after} bytes, {before} before")


app.command()(cache_files.replay)
