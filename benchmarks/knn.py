"""KNN-LM with speculation off and on, on the same prompts: speed, equal answers, and the possible speed-up.

Each prompt is answered under all variants in an order that rotates. `off` searches the datastore for every token; `on`
is the default; `every token asked` verifies every guess, without the bound that skips decided tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.report import Progress, Ratio, paired_ratio, rotated
from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knn.backend import KnnBackend
from agentspec.reasoning.settings import KnnSettings
from agentspec.recordings.calls import json_objects
from agentspec.types import GenerateRequest, KnnSpeculation, SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

OFF, ON, ASKED, FIXED = "off", "on", "on, every token asked", "on, stride 3, every token asked"
VARIANTS: dict[str, dict[str, Any]] = {
    OFF: {},
    ON: {},
    ASKED: {"bound": False},
    FIXED: {"bound": False, "stride": 3},
}

COLUMNS = ("variant", "tok/s", "vs off", "same", "gamma", "decided", "batches saved", "model", "guess", "search")
REQUIRED, AIM = 1.2, 1.6
TRACED = 24  # searches of the stride trace to show


@dataclass(frozen=True, slots=True)
class KnnRun:
    """One answer: its tokens, seconds of wall time including prefill, and its speculation counts."""

    tokens: tuple[int, ...]
    seconds: float
    took: KnnSpeculation


@dataclass(slots=True)
class KnnReport:
    """Runs by variant, one per prompt in the same order, with a datastore of `entries` entries."""

    entries: int
    runs: dict[str, list[KnnRun]] = field(default_factory=lambda: {name: [] for name in VARIANTS})

    def speedup(self, variant: str) -> Ratio:
        off, on = ([run.seconds for run in self.runs[name]] for name in (OFF, variant))
        return paired_ratio(off, on)

    def bound(self) -> float:
        """The speed-up if searches took no time."""
        seconds = sum(run.seconds for run in self.runs[OFF])
        return seconds / (seconds - sum(run.took.search_seconds for run in self.runs[OFF]))

    def gamma(self, variant: str) -> float:
        """The share of right guesses among verified ones; verification stops at the first wrong guess."""
        right = sum(run.took.accepted for run in self.runs[variant])
        wrong = sum(run.took.wrong for run in self.runs[variant])
        return right / max(1, right + wrong)

    def same(self, variant: str) -> int:
        pairs = zip(self.runs[OFF], self.runs[variant], strict=True)
        return sum(one.tokens == other.tokens for one, other in pairs)

    def show(self) -> Iterator[RenderableType]:
        """The speed, shares of time and hit rate of each variant, the bound, and one answer's strides."""
        tokens = sum(len(run.tokens) for run in self.runs[OFF])
        title = f"KNN-LM, {self.entries} entries: {len(self.runs[OFF])} prompts, {tokens} tokens"
        yield report.table(title, COLUMNS, map(self._row, VARIANTS))
        yield f"  bound, if searches cost nothing: {self.bound():.2f}x"
        speedup = self.speedup(ON)
        verdicts = f"required {REQUIRED}x: {speedup.verdict(REQUIRED)}; aim {AIM}x: {speedup.verdict(AIM)}"
        yield f"  {ON} / {OFF}: {speedup}, {verdicts}"
        strides = " ".join(map(str, self.runs[ON][0].took.strides[:TRACED]))
        yield f"  queries of each search, first prompt: {strides}"

    def _row(self, name: str) -> list[str]:
        runs = self.runs[name]
        tokens, seconds = sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)
        queries, searches = sum(run.took.queries for run in runs), sum(run.took.searches for run in runs)
        split = [sum(getattr(run.took, f"{part}_seconds") for run in runs) for part in ("model", "guess", "search")]
        return [
            name,
            f"{tokens / seconds:.1f}",
            str(self.speedup(name)),
            f"{self.same(name)}/{len(runs)}",
            "-" if name == OFF else f"{self.gamma(name):.2f}",
            f"{sum(run.took.decided for run in runs) / tokens:.0%}",
            f"{1 - searches / queries:.0%}" if queries else "-",
            *(f"{part / seconds:.0%}" for part in split),
        ]

    def data(self) -> dict[str, Any]:
        return {
            "entries": self.entries,
            "bound": self.bound(),
            "gamma": {name: self.gamma(name) for name in VARIANTS},
            "ratios": {name: asdict(self.speedup(name)) for name in VARIANTS},
            "runs": {name: [asdict(run) for run in runs] for name, runs in self.runs.items()},
        }


def read_prompts(file: Path, limit: int) -> list[str]:
    """The `prompt`, `question`, `problem` or `text` of each line. Raises `ConfigurationError` for a line without."""
    records = [record for _, record in islice(json_objects(file), limit)]
    names = ("prompt", "question", "problem", "text")
    found = [next((record[name] for name in names if name in record), None) for record in records]
    if None in found or not found:
        raise ConfigurationError(f"{file}: each line must have one of {', '.join(names)}")
    return [f"{text}\n" for text in found]


def run_knn(
    model: str,
    folder: Path,
    prompts: Sequence[str],
    sampling: SamplingParams,
    settings: KnnSettings,
    progress: Progress,
) -> KnnReport:
    """Measure every variant on every prompt. Raises what the backend raises."""
    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch import TorchBackend

    progress(f"loading {model}")
    backend = TorchBackend.load(TorchSettings(model=model, max_draft_tokens=0))

    async def measured() -> KnnReport:
        try:
            return await _measure(backend, folder, prompts, sampling, settings, progress)
        finally:
            await backend.aclose()

    return asyncio.run(measured())


async def _measure(
    backend: TorchBackend,
    folder: Path,
    prompts: Sequence[str],
    sampling: SamplingParams,
    settings: KnnSettings,
    progress: Progress,
) -> KnnReport:
    progress("reading the datastore")
    base = await KnnBackend.open(backend, folder, settings, model=backend.model_name)
    table = KnnReport(base.entries)
    await _timed(base, prompts[0], sampling, speculation=True)  # the first answer includes one-time setup
    for index, prompt in enumerate(prompts):
        progress(f"prompt {index + 1} of {len(prompts)}")
        for name, change in rotated(VARIANTS, index):
            variant = base.with_settings(settings.model_copy(update=change))
            table.runs[name].append(await _timed(variant, prompt, sampling, speculation=name != OFF))
    return table


async def _timed(model: KnnBackend, prompt: str, sampling: SamplingParams, *, speculation: bool) -> KnnRun:
    started = time.perf_counter()
    request = GenerateRequest("", text=prompt, sampling=sampling, speculation=speculation)
    deltas = [delta async for delta in model.generate(request)]
    seconds = time.perf_counter() - started
    took = deltas[-1].speculation
    assert isinstance(took, KnnSpeculation)
    return KnnRun(tuple(token for delta in deltas for token in delta.token_ids), seconds, took)
