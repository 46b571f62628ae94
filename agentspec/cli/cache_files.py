"""`agentspec cache import` and `replay`: recorded calls into the cache, and what it would have saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from agentspec.cli.common import ConfigOption, JsonOption, load, plural, print_json
from agentspec.cli.recorded_files import (
    Advance,
    Files,
    FormatOption,
    SkipOption,
    choose,
    counted,
    found,
    progress,
    recorded_calls,
)
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.recordings.calls import BadLineError, OnBad, RecordedCall
from agentspec.recordings.formats import Format
from agentspec.recordings.redaction import SECRETS, Redaction
from agentspec.types import DEFAULT_TENANT

if TYPE_CHECKING:
    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch.text.model_text import ModelText
    from agentspec.cache.tokens import SequenceRecord
    from agentspec.recordings.replay import EncodedCall
    from agentspec.settings.load import Settings

PathOption = Annotated[str | None, typer.Option(help="The cache's folder or address [default: cache.path]")]


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
    """The model reference of a configured model or backend name; any other name is itself a reference.

    For a strategy it is the reference of the base model.
    """
    local = _local(settings, name)
    return name if local is None else local.model


def _local(settings: Settings, name: str) -> TorchSettings | None:
    """The local backend of a model or backend name."""
    from agentspec.backends.settings import TorchSettings
    from agentspec.settings.models import ModelSettings

    model = settings.models.get(name)
    if model is not None and not isinstance(model, ModelSettings):
        return _local(settings, model.base)
    found = settings.backends.get(name if model is None else model.sources[0])
    return found if isinstance(found, TorchSettings) else None


def import_files(
    files: Files,
    model: Annotated[str, typer.Option(help="The model that will draft from them; its tokenizer reads them")],
    tenant: Annotated[str, typer.Option(help="Whose they become")] = DEFAULT_TENANT,
    format_: FormatOption = None,
    skip_bad: SkipOption = False,
    redact: Annotated[
        list[str] | None,
        typer.Option(help="Replace what matches this regular expression too, as keys are", metavar="REGEX"),
    ] = None,
    keep_secrets: Annotated[bool, typer.Option("--keep-secrets", help="Do not look for keys and passwords")] = False,
    config: ConfigOption = None,
    path: PathOption = None,
    json: JsonOption = False,
) -> None:
    """Remember the answers of recorded calls, so that the first request of the day finds them.

    Reads conversations, logged calls of OpenAI's and Anthropic's APIs, the sessions that coding agents keep (Claude
    Code, Codex), traces, and LangGraph's SQLite checkpoints. Keys and passwords are replaced by [REDACTED] first. All
    files are read before anything is stored; what is there already is not stored again. A server may use the folder.
    """
    settings = load(config)
    folder = folder_of(settings, path, create=True)
    text = _text(settings, model)
    redaction = Redaction([*(() if keep_secrets else SECRETS), *(redact or ())])
    with progress() as (console, advance):
        on_bad, bad = choose(skip_bad, console)
        rows: list[SequenceRecord] = []
        for file in found(files, console):
            read = list(_rows(file, format_, text, tenant, redaction, on_bad, advance))
            if not read:
                console.print(f"{file}: no answers in it", markup=False, highlight=False, soft_wrap=True)
            rows += read
        kept = _admitted(rows, settings, text)
        what = f"storing {plural(len(kept), 'sequence')} in {shown(folder)}"
        advance(what, 0)
        added, known = _store(folder, kept)
        advance(what, len(kept))
    counts = {"added": added, "known": known, "refused": len(rows) - len(kept), "bad": len(bad)}
    if json:
        print_json(counts | {"tokens": sum(len(row.tokens) for row in kept)})
        return
    notes = {"known": "known already", "refused": "refused by a pattern", "bad": "lines left out"}
    more = "".join(f", {counts[name]} {words}" for name, words in notes.items() if counts[name])
    typer.echo(f"imported {plural(added, 'sequence')}{more}")


def _rows(
    file: Path,
    format_: Format | None,
    text: ModelText,
    tenant: str,
    redaction: Redaction,
    on_bad: OnBad,
    advance: Advance,
) -> Iterator[SequenceRecord]:
    """The sequences of a file."""
    for recorded in counted(recorded_calls(file, format_, on_bad), str(file), advance):
        try:
            yield _row(redaction.call(recorded), text, tenant)
        except InvalidRequestError as error:
            on_bad(BadLineError(recorded.place, error.message))


def _admitted(rows: list[SequenceRecord], settings: Settings, text: ModelText) -> list[SequenceRecord]:
    """The rows that no configured pattern refuses."""
    from agentspec.cache.deletion import ContentFilter

    if not settings.cache.refuse_patterns:
        return rows
    refusal = ContentFilter(settings.cache.refuse_patterns)
    return [row for row in rows if not refusal.refuses(row.context, row.tokens, text.tokenizer.decode)]


def _store(folder: Path | str, rows: list[SequenceRecord]) -> tuple[int, int]:
    from agentspec.cache.storage.sequence_store import SequenceStore

    store = SequenceStore.open(folder, disk_bytes=None, mode="follower")
    try:
        return store.add_missing(rows)
    finally:
        store.close()


def _row(recorded: RecordedCall, text: ModelText, tenant: str) -> SequenceRecord:
    """The record that the engine would have stored for this call.

    Raises `InvalidRequestError` for a call without tokens.
    """
    from agentspec.cache.index import DEPTH
    from agentspec.cache.tokens import SequenceRecord, as_tokens

    prompt, answer = text.encode(recorded.messages, recorded.answer, prompt=recorded.prompt, finished=recorded.finished)
    created_at = time.time() if recorded.created_at is None else recorded.created_at
    tokens, context = as_tokens(answer), as_tokens(prompt[-DEPTH:])
    return SequenceRecord(0, text.namespace(tenant), recorded.labels.session, tokens, context, created_at)


def _text(settings: Settings, model: str) -> ModelText:
    from agentspec.backends.torch.text.model_text import ModelText

    return ModelText.load(reference_of(settings, model))


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
    """Tell what recorded calls would have saved with an empty cache at their start, without running a model.

    Every call is drafted step by step against what was really answered. The files are one log, in the order given.
    """
    from agentspec.recordings.replay import measure, print_savings, replay_cache

    encode = _encoder(load(config), model)
    with progress() as (console, advance):
        on_bad, bad = choose(skip_bad, console)
        recorded = (
            call
            for file in found(files, console)
            for call in counted(recorded_calls(file, format_, on_bad), str(file), advance)
        )
        encoded = list(islice(_encoded(recorded, encode, on_bad), calls))
        if not encoded:
            raise ConfigurationError(f"no model calls in {', '.join(map(str, files))}")
        what = f"replaying {plural(len(encoded), 'call')}"
        advance(what, 0)
        savings = measure(replay_cache(encoded, budget))
        advance(what, len(encoded))
    if json:
        print_json(asdict(savings) | {"budget": budget, "bad": len(bad)})
    else:
        print_savings(savings)


def _encoder(settings: Settings, model: str) -> Callable[[RecordedCall], EncodedCall]:
    """An encoder of recorded calls as token arrays; it raises `InvalidRequestError` for bad calls."""
    from agentspec.cache.tokens import as_tokens
    from agentspec.recordings.replay import EncodedCall

    text = _text(settings, model)

    def encode(recorded: RecordedCall) -> EncodedCall:
        tokens = text.encode(recorded.messages, recorded.answer, prompt=recorded.prompt, finished=recorded.finished)
        prompt, answer = map(as_tokens, tokens)
        return EncodedCall(recorded.labels.session or "", prompt, answer)

    return encode


def _encoded(
    recorded: Iterable[RecordedCall], encode: Callable[[RecordedCall], EncodedCall], on_bad: OnBad
) -> Iterator[EncodedCall]:
    for call in recorded:
        try:
            encoded = encode(call)
        except InvalidRequestError as error:
            on_bad(BadLineError(call.place, error.message))
        else:
            yield encoded
