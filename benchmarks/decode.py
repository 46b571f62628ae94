"""Decoding speed of one request at a time: transformers, agentspec off, and agentspec on with cold to warm caches.

All variants answer the same token ids until the model ends the text, one variant after another for each prompt, in an
order that rotates from prompt to prompt, so that a busy machine affects all variants alike. A pair is one prompt under
two variants; time is wall time including prefill. Each cache state has its own tenant. No sequence is added to a cache
while it is measured, but acceptance rates are learned throughout, as in use. KV slots are never kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.report import Progress, RatioGoal, rotated
from agentspec.benchmarks.runs import COLD, OFF, TRANSFORMERS, EngineBench, Run, RunTable, ask, warm_name
from agentspec.recordings.prompt_sets import PromptSet, load_prompts
from agentspec.types import Labels, SamplingParams

MAX_TOKENS = 512
CONTROL_TOKENS = 64
CONTROL_ROUNDS = 4  # with other seeds in each: many pairs are needed to find a difference of two per cent
CONTROL_DISTINCT = 0.95
WARM = 20  # other prompts, which are answered before
LOOKUP_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)

LOOKUP, SECOND = "prompt lookup", "on, second pass"
EDIT_GOALS = (
    RatioGoal(OFF, TRANSFORMERS, 1.05),
    RatioGoal(COLD, TRANSFORMERS, 2.6),
    RatioGoal(warm_name(WARM), TRANSFORMERS, 3.2),
    RatioGoal(SECOND, TRANSFORMERS, 6.0),
)
CONTROL_GOALS = (RatioGoal(COLD, OFF, 0.98),)

Variant = Callable[[Sequence[int], int], Run]


def run_decode(model: str, *, prompts: PromptSet, limit: int, progress: Progress) -> DecodeReport:
    """Measure every variant on the first `limit` prompts of a set. Raises what the backend raises."""
    bench = DecodeBench.load(model, progress, keeps_prefixes=False)
    try:
        bench.record(warm_name(WARM), load_prompts("edit_warm")[:WARM])  # the control starts with learned rates too
        measure = bench.control if prompts == "control" else bench.edits
        return DecodeReport(measure(load_prompts(prompts)[:limit]))
    finally:
        bench.close()


@dataclass(slots=True)
class DecodeBench(EngineBench):
    """The model with warmed caches, and the same model under transformers."""

    def edits(self, prompts: Sequence[str]) -> RunTable:
        table = RunTable("edits")
        self.record(SECOND, prompts)
        self.transformers(self.encode(prompts[0]), 1)  # the first call includes one-time setup
        variants = self.variants()
        for index, prompt in enumerate(prompts):
            self.progress(f"prompt {index + 1} of {len(prompts)}")
            for label, variant in rotated(variants, index):
                table.add(label, variant(self.encode(prompt), index))
        return table

    def control(self, prompts: Sequence[str]) -> RunTable:
        """Measure sampled answers, speculation off and on. Raises ValueError if the answers' text repeats itself.

        Each question is asked in ABBA order (off, on, on, off), so that drift of the machine affects both alike.
        """
        table = RunTable("control", turns=2)
        for index, prompt in enumerate([*prompts] * CONTROL_ROUNDS):
            self.progress(f"control: answer {index + 1} of {CONTROL_ROUNDS * len(prompts)}")
            ids = self.encode(prompt)
            sampling = SamplingParams(temperature=1.0, seed=index, max_tokens=CONTROL_TOKENS)
            variants = {OFF: self._agentspec(OFF, sampling, speculation=False), COLD: self._cold(sampling)}
            there = list(rotated(variants, index))
            for turn, (label, variant) in enumerate((*there, *reversed(there))):
                table.add(label, variant(ids, 4 * index + turn))
        require_distinct(table.runs[OFF])
        return table

    def record(self, tenant: str, prompts: Sequence[str]) -> None:
        """Answer `prompts` for `tenant`, whose cache stores the answers."""
        for index, prompt in enumerate(map(self.encode, prompts)):
            self.progress(f"warming {tenant!r}: {index + 1} of {len(prompts)}")
            self.loop.run_until_complete(ask(self.backend, prompt, GREEDY, tenant, labels=Labels(f"warm-{index}")))

    def variants(self) -> dict[str, Variant]:
        return {
            TRANSFORMERS: lambda prompt, _: self.transformers(prompt, MAX_TOKENS),
            LOOKUP: lambda prompt, _: self.transformers(prompt, MAX_TOKENS, prompt_lookup_num_tokens=LOOKUP_TOKENS),
            OFF: self._agentspec(OFF, GREEDY, speculation=False),
            COLD: self._cold(GREEDY),
            warm_name(WARM): self._agentspec(warm_name(WARM), GREEDY),
            SECOND: self._agentspec(SECOND, GREEDY),
        }

    def _agentspec(self, tenant: str, sampling: SamplingParams, *, speculation: bool = True) -> Variant:
        def variant(prompt: Sequence[int], index: int) -> Run:
            labels = Labels(f"run-{index}")
            answer = ask(self.backend, prompt, sampling, tenant, labels=labels, speculation=speculation, store=False)
            return self.loop.run_until_complete(answer)

        return variant

    def _cold(self, sampling: SamplingParams) -> Variant:
        """A variant that uses a new tenant with an empty cache for each answer."""
        return lambda prompt, index: self._agentspec(f"{COLD} {index}", sampling)(prompt, index)


def require_distinct(runs: Sequence[Run]) -> None:
    """Raises ValueError if the control's text repeats itself, judged over all answers together."""
    share = sum(distinct_ngrams(run.tokens) for run in runs) / len(runs)
    if share < CONTROL_DISTINCT:
        raise ValueError(
            f"the control repeats itself: {share:.3f} of its 4-grams are distinct, need {CONTROL_DISTINCT}"
        )


def distinct_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """The share of the n-grams of `tokens` that are distinct: 1.0 if no n-gram repeats."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


@dataclass(frozen=True, slots=True)
class DecodeReport:
    table: RunTable

    @property
    def baseline(self) -> str:
        return TRANSFORMERS if TRANSFORMERS in self.table.runs else OFF

    @property
    def goals(self) -> tuple[RatioGoal, ...]:
        return EDIT_GOALS if self.baseline == TRANSFORMERS else CONTROL_GOALS

    def show(self) -> Iterator[RenderableType]:
        table, baseline = self.table, self.baseline
        title = f"{table.name}: {len(table.speeds(baseline))} prompts, {table.tokens(baseline)} answer tokens"
        columns = ("variant", "tok/s", f"vs {baseline}", "tokens/step", f"same as {OFF}")
        yield report.table(title, columns, map(self._row, table.runs))
        yield from table.goal_lines(self.goals)

    def _row(self, variant: str) -> tuple[str, ...]:
        table = self.table
        ratio, same = table.ratio(variant, self.baseline), table.same(variant, OFF)
        return variant, f"{table.total_speed(variant):.1f}", str(ratio), table.steps_cell(variant), same

    def data(self) -> dict[str, Any]:
        return {
            "name": self.table.name,
            "baseline": self.baseline,
            "ratios": self.table.ratio_data(dict.fromkeys(self.table.runs, self.baseline)),
            "goals": self.table.goal_data(self.goals),
            "runs": self.table.run_data(),
        }
