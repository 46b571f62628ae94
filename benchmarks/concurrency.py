"""Total speed of concurrent requests against the same requests one after another, speculation off and on.

Each round has its own prompts and runs them under all four variants in an order that rotates, so that a busy machine
affects all variants alike; a pair is one round under two variants. Answers are greedy, time is wall time including
prefill, and each round drafts from an empty cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks import report
from agentspec.benchmarks.decode import PREFIX_BYTES_OFF
from agentspec.benchmarks.report import Progress, RatioGoal, rotated
from agentspec.benchmarks.runs import Run, RunTable, ask
from agentspec.recordings.prompt_sets import load_prompts
from agentspec.types import SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

OFF_ALONE, OFF_AT_ONCE = "off, one at a time", "off, at once"
ON_ALONE, ON_AT_ONCE = "on, one at a time", "on, at once"
VARIANTS = {
    OFF_ALONE: (False, False),
    OFF_AT_ONCE: (False, True),
    ON_ALONE: (True, False),
    ON_AT_ONCE: (True, True),
}
BASELINES = {OFF_ALONE: OFF_ALONE, OFF_AT_ONCE: OFF_ALONE, ON_ALONE: ON_ALONE, ON_AT_ONCE: ON_ALONE}
GOALS = (RatioGoal(OFF_AT_ONCE, OFF_ALONE, 1.8), RatioGoal(ON_AT_ONCE, ON_ALONE, 1.5))


@dataclass(frozen=True, slots=True)
class ConcurrencyReport:
    """One run for each round and variant; a run holds the tokens of all answers of its round."""

    runs: RunTable

    def show(self) -> Iterator[RenderableType]:
        runs = self.runs
        title = f"{runs.name}: {len(runs.runs[OFF_ALONE])} rounds, {runs.tokens(OFF_ALONE)} answer tokens"
        rows = [
            (one, f"{runs.total_speed(one):.1f}", str(runs.ratio(one, baseline)), runs.same(one, OFF_ALONE))
            for one, baseline in BASELINES.items()
        ]
        yield report.table(title, ("variant", "tok/s in all", "vs one at a time", f"same as {OFF_ALONE}"), rows)
        yield from runs.goal_lines(GOALS)

    def data(self) -> dict[str, Any]:
        return {"ratios": self.runs.ratio_data(BASELINES), "runs": self.runs.run_data()}


def run_concurrency(
    model: str, *, clients: int, rounds: int, max_tokens: int, progress: Progress = lambda message: None
) -> ConcurrencyReport:
    """Measure all variants. Raises what the backend raises."""
    from agentspec.backends.torch import TorchBackend
    from agentspec.cache import SuffixCache

    progress(f"loading {model}")
    settings = TorchSettings(model=model, prefix_bytes=PREFIX_BYTES_OFF, max_active=clients)  # type: ignore[arg-type]
    backend = TorchBackend.load(settings, cache=SuffixCache.open())
    try:
        return ConcurrencyReport(asyncio.run(_measure(backend, clients, rounds, max_tokens, progress)))
    finally:
        asyncio.run(backend.aclose())


async def _measure(backend: TorchBackend, clients: int, rounds: int, max_tokens: int, progress: Progress) -> RunTable:
    table = RunTable(f"{clients} requests at once")
    texts = load_prompts("edit_warm")
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for index in range(rounds):
        progress(f"round {index + 1} of {rounds}")
        chosen = (texts[(index * clients + place) % len(texts)] for place in range(clients))
        prompts = [backend.encode_chat([{"role": "user", "content": text}]) for text in chosen]
        for name, (speculation, at_once) in rotated(VARIANTS, index):
            options: dict[str, Any] = {"speculation": speculation, "store": False}
            answers = [ask(backend, prompt, sampling, f"{name}: {index}", **options) for prompt in prompts]
            table.add(name, await _timed(answers, at_once=at_once))
    return table


async def _timed(answers: Sequence[Awaitable[Run]], *, at_once: bool) -> Run:
    started = time.perf_counter()
    runs = await asyncio.gather(*answers) if at_once else [await answer for answer in answers]
    return Run(tuple(token for run in runs for token in run.tokens), time.perf_counter() - started)
