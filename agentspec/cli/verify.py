"""`agentspec verify` checks that speculation does not change the answers of a model on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentspec.cli.common import FAILED, INTERRUPTED, JsonOption, ModelOption, print_json
from agentspec.errors import ConfigurationError
from agentspec.types import SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend
    from agentspec.backends.torch.exactness import ExactnessCase, ExactnessReport, TokenDivergence
    from agentspec.recordings.calls import RecordedCall

SAMPLED = 0.8  # the temperature of the second round


def verify(
    model: ModelOption = "smollm2-135m",
    calls: Annotated[
        Path | None,
        typer.Option(help="Your own recorded calls instead of the built-in prompts", exists=True, dir_okay=False),
    ] = None,
    limit: Annotated[int, typer.Option(help="Only the first so many prompts", min=1)] = 2,
    max_tokens: Annotated[int, typer.Option(help="Longest answer", min=1)] = 24,
    json: JsonOption = False,
) -> None:
    """Answer prompts with speculation off, on, on again, and side by side; exit code 1 where they truly differ.

    The default is short; --limit 20 --max-tokens 64 checks 25 times as much. Ctrl-C shows what was found so far. Greedy
    and sampled with a seed. Answers may part where two tokens are equally good within rounding: each such place is
    shown with how far apart the two were, computed in both ways.
    """
    from rich.console import Console

    recorded = None if calls is None else _recorded(calls)  # before torch is imported

    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch import TorchBackend
    from agentspec.backends.torch.exactness import ExactnessReport, check_exactness
    from agentspec.cache import SuffixCache

    with Console(stderr=True).status(f"loading {model}") as status, SuffixCache.open() as cache:
        backend = TorchBackend.load(TorchSettings(model=model), cache=cache)
        found, interrupted = ExactnessReport(), False
        try:
            questions = _questions(backend, _prompts(backend, recorded), limit, max_tokens)
            found = asyncio.run(check_exactness(backend, questions, status.update, found))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            asyncio.run(backend.aclose())
    if json:
        print_json({"exact": found.exact and not interrupted, "interrupted": interrupted, **asdict(found)})
    else:
        _print(found, backend, interrupted)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if not found.exact:
        raise typer.Exit(FAILED)


def _recorded(file: Path) -> list[RecordedCall]:
    """The calls of a file. Raises `AgentSpecError` for one without any."""
    from agentspec.recordings.formats import read

    found = list(read(file))
    if not found:
        raise ConfigurationError(f"{file} holds no recorded call")
    return found


def _prompts(backend: TorchBackend, recorded: Sequence[RecordedCall] | None) -> Iterator[Sequence[int]]:
    """Token ids of the prompts of recorded calls, or of built-in prompts with and without repeating text."""
    from agentspec.recordings.prompt_sets import load_prompts

    if recorded is None:
        texts = chain.from_iterable(zip_longest(load_prompts("edit_short"), load_prompts("control")))
        return (backend.encode_chat([{"role": "user", "content": text}]) for text in texts if text is not None)
    return (
        backend.encode_chat(call.messages) if call.prompt is None else backend.encode(call.prompt) for call in recorded
    )


def _questions(
    backend: TorchBackend, prompts: Iterator[Sequence[int]], limit: int, max_tokens: int
) -> list[ExactnessCase]:
    """A greedy and a sampled case for each prompt that leaves room for an answer.

    Raises `ConfigurationError` if no prompt does.
    """
    from agentspec.backends.torch.exactness import ExactnessCase

    fitting = list(islice((p for p in prompts if p and len(p) + max_tokens <= backend.context_length), limit))
    if not fitting:
        raise ConfigurationError(
            f"no prompt leaves room for {max_tokens} of the model's {backend.context_length} tokens"
        )
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    sampled = [replace(greedy, temperature=SAMPLED, seed=seed) for seed in range(len(fitting))]
    return [
        *(ExactnessCase(prompt, greedy) for prompt in fitting),
        *(ExactnessCase(prompt, sampling) for prompt, sampling in zip(fitting, sampled, strict=True)),
    ]


def _print(found: ExactnessReport, backend: TorchBackend, interrupted: bool) -> None:
    target, count = backend.target, found.answered("off") if found.answers else 0
    dtype = str(target.dtype).removeprefix("torch.")
    typer.echo(f"{backend.model_name}, {dtype} on {target.device}: {count} answers, half greedy, half sampled")
    for way in list(found.answers)[1:]:
        ties = sum(each.is_tie for each in found.divergences if each.way == way)
        tail = f", {ties} part at a near-tie" if ties else ""
        typer.echo(f"  {way}: {found.identical(way)} of {found.answered(way)} equal those without speculation{tail}")
    if found.divergences:
        typer.echo(_description(min(found.divergences, key=lambda each: each.is_tie), backend))
    verdict = "interrupted: no verdict" if interrupted else "exact"
    typer.echo(verdict if found.exact else "NOT exact: please report this, with the lines above")


def _description(divergence: TokenDivergence, backend: TorchBackend) -> str:
    """Describe a divergence: its position, the two tokens, and the difference of their scores."""
    off, on = (repr(backend.decode([token])) if token >= 0 else "the end" for token in (divergence.off, divergence.on))
    return (
        f"  {divergence.way}, answer {divergence.question + 1}, token {divergence.position + 1}: {on} for {off}; scores"
        f" apart by {divergence.gap_apart:+.2g} token by token, {divergence.gap_together:+.2g} in one forward,"
        f" {'a near-tie' if divergence.is_tie else 'no near-tie'} (limit {divergence.tie:g})"
    )
