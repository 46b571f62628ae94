"""`agentspec cache` shows and checks what the token cache holds, and deletes from it or shrinks it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from agentspec.cli.common import FAILED, ConfigOption, JsonOption, command_group, load, plural, print_json
from agentspec.cli.recorded_files import (
    Advance,
    Files,
    FormatOption,
    SkipOption,
    choose,
    counted,
    found,
    progress,
)
from agentspec.errors import AgentSpecError, ConfigurationError, InvalidRequestError
from agentspec.recordings.calls import BadLineError, OnBad, RecordedCall
from agentspec.recordings.formats import Format, read
from agentspec.recordings.redaction import Redaction
from agentspec.types import DEFAULT_TENANT

if TYPE_CHECKING:
    from agentspec.backends.torch.text.model_text import ModelText
    from agentspec.cache import SuffixCache
    from agentspec.cache.tokens import SequenceRecord
    from agentspec.settings.load import Settings

PathOption = Annotated[str | None, typer.Option(help="The cache's folder or address [default: cache.path]")]

_ERASURE_SECONDS = 60.0  # how long `forget` waits for others to let what it deleted be erased
_FORGET_MEMORY = 1 << 20  # bytes; deleting needs the database, not the index

# What `stats` prints of `CacheStats`; the other figures are those of a server's requests, and of `--json`.
_FIGURES = {
    "sequences": "cached answers",
    "tokens": "tokens in them",
    "namespaces": "tenants and models",
    "disk_bytes": "bytes on disk",
    "memory_bytes": "bytes when loaded",
}
_TROUBLES = {
    "unread": "not loaded yet",
    "damaged": "damaged, left out",
    "segments_skipped": "segments rebuilt",
    "segment_error": "segment problem",
    "store_error": "not written because",
    "erasure_pending": "still to be erased",
}

app = command_group("Show, fill, check and delete from the token cache.")


@app.command()
def stats(config: ConfigOption = None, path: PathOption = None, json: JsonOption = False) -> None:
    """Print how much the cache on disk holds. A server may use it at the same time."""
    from agentspec.cache import SuffixCache

    with SuffixCache.open(folder_of(load(config), path), mode="follower") as opened:
        values = asdict(opened.stats())
    if json:
        print_json(values)
        return
    for name, words in _FIGURES.items():
        typer.echo(f"{words:<20} {values[name]}")
    for name, words in _TROUBLES.items():
        if values[name]:
            typer.echo(f"{words:<20} {'yes' if values[name] is True else values[name]}")


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
    """Delete outputs that match all given options, on disk and in the servers that use the folder."""
    from agentspec.cache import SuffixCache

    settings = load(config)
    folder = folder_of(settings, path)
    conditions = _conditions(session, tenant, older_than) | _search(settings, text, model)
    if not conditions:
        raise ConfigurationError("say what to forget: --session, --tenant, --older-than or --text with --model")
    shown_conditions = {
        f"session {session!r}": session,
        f"tenant {tenant!r}": tenant,
        f"older than {older_than}": older_than,
        f"holding the text, from models with the tokenizer of {model}": model,
    }
    described = ", ".join(words for words, value in shown_conditions.items() if value is not None)
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
    typer.echo(f"The database now takes {left} bytes. Servers that use it drop the deleted text within seconds;")
    typer.echo("backups, logs and upstream servers keep their copies: see docs/cache.md, Forgetting.")


def _wait_for_erasure(opened: SuffixCache) -> bool:
    """Wait until no byte of what was deleted is left, which the cache's own thread tries again and again."""
    until = time.monotonic() + _ERASURE_SECONDS
    if opened.stats().erasure_pending:
        typer.echo(f"deleted; waiting up to {_ERASURE_SECONDS:g} s until no process reads the files", err=True)
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
        raise ConfigurationError("--text and --model go together: only its tokenizer can read a model's tokens")
    from agentspec.backends.torch.text.model_text import load_tokenizer
    from agentspec.backends.torch.text.tokenizer import TokenizerAdapter

    tokenizer, tokenizer_hash = load_tokenizer(reference_of(settings, model))
    wanted = typer.get_text_stream("stdin").read().rstrip("\n") if text == "-" else text
    return {"text": wanted, "decode": TokenizerAdapter(tokenizer).decode, "tokenizer": tokenizer_hash}


@app.command()
def verify(config: ConfigOption = None, path: PathOption = None, json: JsonOption = False) -> None:
    """Check the database, every sequence and the index built from them; exit code 1 if something is wrong.

    Changes nothing. A server may use the folder at the same time.
    """
    from agentspec.cache import SuffixCache
    from agentspec.cache.storage.sequence_store import SequenceStore

    settings = load(config)
    folder = folder_of(settings, path)
    try:
        with closing(SequenceStore.open(folder, disk_bytes=None, mode="follower")) as store:
            problems = list(store.problems())
        if not problems:  # the index of a damaged database would show nothing more
            with SuffixCache.open(folder, mode="follower", memory_bytes=int(settings.cache.memory_bytes)) as cache:
                cache.check_integrity()
    except AgentSpecError as error:
        problems = [str(error)]
    if json:
        print_json({"ok": not problems, "problems": problems})
    else:
        typer.echo("\n".join(problems) or f"ok: {shown(folder)}")
    if problems:
        raise typer.Exit(FAILED)


@app.command()
def compact(config: ConfigOption = None, path: PathOption = None, json: JsonOption = False) -> None:
    """Free unused space of the cache on disk. Refused while a server writes to the folder."""
    from agentspec.cache import SuffixCache

    folder = folder_of(load(config), path)
    with SuffixCache.open(folder, mode="writer") as opened:
        size = opened.compact()
    if json:
        print_json({"disk_bytes": size})
    else:
        typer.echo(f"{shown(folder)}: takes {size} bytes now")


# Recorded calls.


def folder_of(settings: Settings, path: str | None, *, create: bool = False) -> Path | str:
    """The folder or database at `path`, or the configured one.

    Raises `ConfigurationError` if neither is set, and for a folder without a cache unless `create` is true.
    """
    from agentspec.cache.storage.sqlite import DATABASE

    chosen = settings.cache if path is None else settings.cache.model_copy(update={"path": _location(path)})
    folder = chosen.location()
    if folder is None:
        raise ConfigurationError(
            "the cache is in memory only, so there is no folder to use: give --path FOLDER, or set cache.path in"
            " agentspec.toml"
        )
    if isinstance(folder, Path) and not (create or (folder / DATABASE).is_file()):  # else one would be made there
        raise ConfigurationError(f"there is no cache at {str(folder)!r}; a server with this cache.path creates it")
    return folder


def shown(folder: Path | str) -> str:
    """The folder or database address for printing, without a password."""
    from agentspec.cache.settings import without_password

    return without_password(str(folder))


def _location(path: str) -> Path | str:
    from agentspec.cache.settings import parse_location

    try:
        return cast("Path | str", parse_location(path))
    except ValueError as error:
        raise ConfigurationError(f"--path {error}") from None


def reference_of(settings: Settings, name: str) -> str:
    """The model reference of a configured model or backend, of a strategy that of its base model. Any other name is
    itself a reference.
    """
    from agentspec.backends.settings import TorchSettings
    from agentspec.settings.models import ModelSettings

    model = settings.models.get(name)
    if model is not None and not isinstance(model, ModelSettings):
        return reference_of(settings, model.base)
    found = settings.backends.get(name if model is None else model.sources[0])
    return found.model if isinstance(found, TorchSettings) else name


@app.command("import")
def import_files(
    files: Files,
    model: Annotated[str, typer.Option(help="The model that will draft from them; its tokenizer reads them")],
    tenant: Annotated[str, typer.Option(help="The tenant that they become part of")] = DEFAULT_TENANT,
    format_: FormatOption = None,
    skip_bad: SkipOption = False,
    config: ConfigOption = None,
    path: PathOption = None,
    json: JsonOption = False,
) -> None:
    """Store the answers of recorded calls, so that the first requests find drafts.

    Reads conversations, logged calls of OpenAI's and Anthropic's APIs, the sessions that coding agents keep (Claude
    Code, Codex), and traces. Keys and passwords are replaced by [REDACTED] first. All files are read before anything is
    stored; what is there already is not stored again. A server may use the folder.
    """
    from agentspec.cache.storage.sequence_store import SequenceStore

    settings = load(config)
    folder = folder_of(settings, path, create=True)
    text, redaction = _model_text(settings, model), Redaction()
    with progress() as (console, advance):
        on_bad, bad = choose(skip_bad, console)
        rows: list[SequenceRecord] = []
        seen: set[_Key] = set()
        for file in found(files, console):
            new = [
                _record(one, text, tenant)
                for one in _encoded(file, format_, text, on_bad, advance, seen, redaction.call)
            ]
            if not new:
                console.print(f"{file}: no further answers in it", markup=False, highlight=False, soft_wrap=True)
            rows += new
        admitted = _admitted(rows, settings, text)
        what = f"storing {plural(len(admitted), 'sequence')} in {shown(folder)}"
        advance(what, 0)
        with closing(SequenceStore.open(folder, disk_bytes=None, mode="follower")) as store:
            added, known = store.add_missing(admitted)
        advance(what, len(admitted))
    counts = {"added": added, "known": known, "refused": len(rows) - len(admitted), "bad": len(bad)}
    if json:
        print_json(counts | {"tokens": sum(len(row.tokens) for row in admitted)})
        return
    notes = {"known": "known already", "refused": "refused by a pattern", "bad": "lines left out"}
    more = "".join(f", {counts[name]} {words}" for name, words in notes.items() if counts[name])
    typer.echo(f"imported {plural(added, 'sequence')}{more}")


_Key = tuple[str, str]
"""The id and the content of an answer: a server may give two answers one id."""
_EncodedCall = tuple[RecordedCall, Sequence[int], Sequence[int]]
"""A call with the tokens of its prompt and of its answer."""


def _encoded(
    file: Path,
    format_: Format | None,
    text: ModelText,
    on_bad: OnBad,
    advance: Advance,
    seen: set[_Key],
    change: Callable[[RecordedCall], RecordedCall] = lambda call: call,
) -> Iterator[_EncodedCall]:
    """The calls of a file, as `change` returns them, with their tokens. One without tokens is a bad line, and those
    that are `seen`, say in the file of the session that was forked, are left out.
    """
    for recorded in counted(read(file, format_, on_bad), str(file), advance):
        if recorded.id is not None:
            if (key := (str(recorded.id), repr(recorded.answer))) in seen:
                continue
            seen.add(key)
        try:
            call = change(recorded)
            tokens = text.encode(call.messages, call.answer, prompt=call.prompt, finished=call.finished)
        except InvalidRequestError as error:
            on_bad(BadLineError(recorded.place, error.message))
        else:
            yield call, *tokens


def _admitted(rows: list[SequenceRecord], settings: Settings, text: ModelText) -> list[SequenceRecord]:
    """The rows that no configured pattern refuses."""
    from agentspec.cache.deletion import ContentFilter

    if not settings.cache.refuse_patterns:
        return rows
    refusal = ContentFilter(settings.cache.refuse_patterns)
    return [row for row in rows if not refusal.refuses(row.context, row.tokens, text.tokenizer.decode)]


def _record(encoded: _EncodedCall, text: ModelText, tenant: str) -> SequenceRecord:
    """The record that the engine would have stored for this call."""
    from agentspec.cache.index import DEPTH
    from agentspec.cache.tokens import SequenceRecord, as_tokens

    call, prompt, answer = encoded
    created_at = time.time() if call.created_at is None else call.created_at
    tokens, context = as_tokens(answer), as_tokens(prompt[-DEPTH:])
    return SequenceRecord(0, text.namespace(tenant), call.labels.session, tokens, context, created_at)


def _model_text(settings: Settings, model: str) -> ModelText:
    from agentspec.backends.torch.text.model_text import ModelText

    return ModelText.load(reference_of(settings, model))


@app.command()
def replay(
    files: Files,
    model: Annotated[str, typer.Option(help="The model that would answer; only its tokenizer is read")],
    format_: FormatOption = None,
    skip_bad: SkipOption = False,
    calls: Annotated[int | None, typer.Option(help="Only the first so many calls", min=1)] = None,
    budget: Annotated[int, typer.Option(help="Most drafted tokens a step", min=1)] = 32,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Compute what recorded calls would have saved with an empty cache at their start, without running a model.

    Every call is drafted step by step against what was really answered. The files are one log, in the order given.
    """
    from agentspec.cache.tokens import as_tokens
    from agentspec.recordings.replay import EncodedCall, replay_cache

    text = _model_text(load(config), model)
    with progress() as (console, advance):
        on_bad, bad = choose(skip_bad, console)
        seen: set[_Key] = set()
        every = (one for file in found(files, console) for one in _encoded(file, format_, text, on_bad, advance, seen))
        encoded = [
            EncodedCall(call.labels.session or "", as_tokens(prompt), as_tokens(answer))
            for call, prompt, answer in islice(every, calls)
        ]
        if not encoded:
            raise ConfigurationError(f"no model calls in {', '.join(map(str, files))}")
        what = f"replaying {plural(len(encoded), 'call')}"
        advance(what, 0)
        done = replay_cache(encoded, budget)
        advance(what, len(encoded))
    sums = {"calls": len(encoded), "tokens": sum(done.tokens), "steps": sum(done.steps)}
    rates = {name: getattr(done, name) for name in ("tokens_per_step", "drafted_per_step", "hit_rate", "saved")}
    if json:
        print_json(sums | rates | {"budget": budget, "bad": len(bad)})
        return
    typer.echo(
        "{tokens} tokens of {calls} calls in {steps} steps of the model: {saved:.0%} of its steps saved."
        " {tokens_per_step:.2f} tokens a step, {drafted_per_step:.1f} drafted; {hit_rate:.0%} of the steps have a"
        " hit.".format(**sums, **rates)
    )
