"""Requests at once on two vLLM servers, one with Arctic Inference and one with our drafter, both warm, round by round.

Both servers run all the time and only one is asked at a time; which comes first changes from round to round. Beside the
clock stand the server's processor time and its counters, which other programs on the machine change little or not.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.report import MIN_PAIRS, Progress, RatioGoal, paired_ratio, rotated
from agentspec.benchmarks.vllm.bench import ARCTIC, PLUGIN, SETTLE, VllmInstallation, launched, variants
from agentspec.benchmarks.vllm.client import CLIENTS, MAX_TOKENS, ClientAnswer, ask
from agentspec.benchmarks.vllm.server import VllmServer
from agentspec.errors import ConfigurationError
from agentspec.recordings.prompt_sets import load_prompts

GOAL = 1.15
COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "steps": "vllm:iteration_tokens_total_count",
}
COLUMNS = (
    "server", "tok/s", "tok/processor s", "engine steps", "requests/step", "drafted", "accepted", "answer tokens/step",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedRound:
    """All prompts answered by one server, `CLIENTS` at a time: seconds, and what the server counted meanwhile."""

    seconds: float
    processor: float
    tokens: int
    drafts: float  # chains verified
    drafted: float  # their tokens
    accepted: float
    steps: float  # of the engine, those that read prompts included
    texts: tuple[str, ...] = ()

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def processor_speed(self) -> float:
        """Answer tokens by second of the server's processor time."""
        return self.tokens / self.processor


@dataclass(slots=True)
class TogetherReport:
    """The rounds of each server."""

    prompts: int
    rounds: dict[str, list[LoadedRound]] = field(default_factory=dict)

    def show(self) -> Iterator[RenderableType]:
        title = f"{CLIENTS} at once, warm: {self.prompts} answers a round"
        yield report.table(title, COLUMNS, (self._row(name) for name in self.rounds))
        one, other = self.rounds[PLUGIN], self.rounds[ARCTIC]
        same = sum(a.texts == b.texts for a, b in zip(one, other, strict=True))
        yield f"  rounds with equal texts: {same} of {len(one)}"
        for what, ratios in self._ratios().items():
            yield f"  {what}, {PLUGIN} / {ARCTIC}, round by round: {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
        if len(one) >= MIN_PAIRS:
            yield from self._goal_lines(one, other)

    def _ratios(self) -> dict[str, list[float]]:
        pairs = list(zip(self.rounds[PLUGIN], self.rounds[ARCTIC], strict=True))
        return {
            "tok/s": [a.speed / b.speed for a, b in pairs],
            "tok/processor s": [a.processor_speed / b.processor_speed for a, b in pairs],
        }

    def _goal_lines(self, one: Sequence[LoadedRound], other: Sequence[LoadedRound]) -> Iterator[str]:
        clock = paired_ratio([a.speed for a in one], [b.speed for b in other])
        processor = paired_ratio([a.processor_speed for a in one], [b.processor_speed for b in other])
        yield RatioGoal(PLUGIN, ARCTIC, GOAL).line(clock)
        yield RatioGoal(f"{PLUGIN}, by processor time", ARCTIC, GOAL).line(processor)

    def _row(self, name: str) -> tuple[str, ...]:
        rounds = self.rounds[name]
        tokens, chains, steps = (sum(getattr(one, of) for one in rounds) for of in ("tokens", "drafts", "steps"))
        drafted, accepted = (sum(getattr(one, of) for one in rounds) for of in ("drafted", "accepted"))
        return (
            name,
            f"{tokens / sum(one.seconds for one in rounds):.1f}",
            f"{tokens / sum(one.processor for one in rounds):.1f}",
            f"{steps / len(rounds):.1f}",
            f"{chains / max(1, steps):.1f}",
            f"{drafted / max(1, chains):.1f} a chain, {drafted / max(1, steps):.1f} a step",
            f"{accepted / max(1, drafted):.0%}",
            f"{tokens / max(1, steps):.1f}",
        )

    def data(self) -> dict[str, Any]:
        return asdict(self)


def run_together(
    place: VllmInstallation, *, rounds: int, limit: int | None, long: bool = False, progress: Progress
) -> TogetherReport:
    """Warm both servers, then run `rounds` on each, with short code edits or `long` ones. Raises `ConfigurationError`
    without Arctic Inference in the environment, `RuntimeError` if a server does not start.
    """
    prompts = load_prompts("edit" if long else "edit_short")[:limit]
    with tempfile.TemporaryDirectory(prefix="agentspec-bench-") as folder, ExitStack() as stack:
        known = variants(place.environment, Path(folder))
        if ARCTIC not in known:
            raise ConfigurationError("Arctic Inference is the other server here: install arctic-inference beside vLLM")
        chosen = {name: known[name] for name in (ARCTIC, PLUGIN)}
        servers = stack.enter_context(launched(chosen, place, Path(folder), progress))
        found = TogetherReport(len(prompts))
        _warm(servers, prompts, progress)
        for index in range(rounds):
            progress(f"round {index + 1} of {rounds}")
            for name, server in rotated(servers, index):
                time.sleep(SETTLE)
                found.rounds.setdefault(name, []).append(_round(server, prompts))
    return found


def _warm(servers: Mapping[str, VllmServer], prompts: Sequence[str], progress: Progress) -> None:
    """Have every prompt answered alone, then all of them at once."""
    for name, server in servers.items():
        for index, prompt in enumerate(prompts):
            progress(f"warming {name}: prompt {index + 1} of {len(prompts)}")
            ask(server, prompt, max_tokens=MAX_TOKENS)
        _round(server, prompts)


def _round(server: VllmServer, prompts: Sequence[str]) -> LoadedRound:
    before, processor = {key: server.metric(name) for key, name in COUNTERS.items()}, server.processor()
    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers: list[ClientAnswer] = list(pool.map(lambda prompt: ask(server, prompt, max_tokens=MAX_TOKENS), prompts))
    seconds, processor = time.perf_counter() - started, server.processor() - processor
    counted = {key: server.metric(name) - before[key] for key, name in COUNTERS.items()}
    tokens, texts = sum(answer.tokens for answer in answers), tuple(answer.text for answer in answers)
    return LoadedRound(seconds, processor, tokens, **counted, texts=texts)
