"""`agentspec cache replay` reports what the cache would have saved for a recorded log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentspec.cli.cache.folder import adapter_of, reference_of
from agentspec.cli.common import ConfigOption, JsonOption, load, plural, print_json
from agentspec.cli.recorded_files import (
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

if TYPE_CHECKING:
    from agentspec.recordings.traces import EncodedCall
    from agentspec.settings.load import Settings


def replay(
    files: Files,
    model: Annotated[str | None, typer.Option(help="The model that would answer; only its tokenizer is read")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="In place of --model: folder with a ChatML tokenizer.json", file_okay=False)
    ] = None,
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

    encode = _encoder(load(config), model, tokenizer)
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


def _encoder(settings: Settings, model: str | None, tokenizer: Path | None) -> Callable[[RecordedCall], EncodedCall]:
    """An encoder of recorded calls as token arrays; it raises `InvalidRequestError` or `BadLineError` for bad calls."""
    if (model is None) == (tokenizer is None):
        raise ConfigurationError("give either --model or --tokenizer: tokens are what is drafted")
    from agentspec.recordings.traces import EncodedCall, chatml, load_encoder

    if tokenizer is not None:
        return chatml(load_encoder(tokenizer))
    from agentspec.backends.torch.text.model_text import ModelText
    from agentspec.cache.tokens import as_tokens

    name = model or ""
    text = ModelText.load(reference_of(settings, name), adapter=adapter_of(settings, name))

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
        except BadLineError as error:
            on_bad(error)
        except InvalidRequestError as error:
            on_bad(BadLineError(call.place, error.message))
        else:
            yield encoded
