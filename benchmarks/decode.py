"""Decoding speed of one request at a time: transformers, agentspec off, and agentspec on with cold to warm caches.

All variants answer the same token ids until the model ends the text, one variant after another for each prompt, in an
order that rotates from prompt to prompt, so that a busy machine affects all variants alike. A pair is one prompt under
two variants; time is wall time including prefill. Each cache state of each table has its own tenant. No sequence is
added to a cache while it is measured, but acceptance rates are learned throughout, as in use. KV slots are never kept
between calls.
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
CONTROL_TOKENS = 128
CONTROL_ROUNDS = 4  # with other seeds in each: many pairs are needed to find a difference of two per cent
CONTROL_DISTINCT = 0.95
WARM_COUNTS = (10, 100)
LOOKUP_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)

LOOKUP, SECOND = "prompt lookup", "on, second pass"
EDIT_GOALS = (
    RatioGoal(OFF, TRANSFORMERS, 1.05),
    RatioGoal(COLD, TRANSFORMERS, 2.6),
    RatioGoal(warm_name(max(WARM_COUNTS)), TRANSFORMERS, 3.2),
    RatioGoal(SECOND, TRANSFORMERS, 6.0),
)
CONTROL_GOALS = (RatioGoal(COLD, OFF, 0.98),)

Variant = Callable[[Sequence[int], int], Run]


def second_tenant(table: str) -> str:
    return f"{table}: {SECOND}"


def run_decode(
    model: str,
    *,
    sets: Sequence[PromptSet],
    limit: int | None,
    progress: Progress,
) -> DecodeReport:
    """Measure every variant on the prompt sets and the control; one table each. Raises what the backend raises."""
    bench = DecodeBench.load(model, progress, keeps_prefixes=False)
    try:
        bench.warm(WARM_COUNTS if sets else WARM_COUNTS[:1])  # so that the control starts with learned acceptance rates
        tables = [bench.measure(name, load_prompts(name)[:limit]) for name in sets]
        return DecodeReport([*tables, bench.control(load_prompts("control")[:limit])])
    finally:
        bench.close()


@dataclass(slots=True)
class DecodeBench(EngineBench):
    """The model with warmed caches, and the same model under transformers."""

    def measure(self, name: PromptSet, prompts: Sequence[str]) -> RunTable:
        table = RunTable(name)
        encoded = [self.encode(prompt) for prompt in prompts]
        self.record(second_tenant(name), encoded)
        self.transformers(encoded[0], MAX_TOKENS)  # the first call includes one-time setup
        variants = self.variants(name)
        for index, prompt in enumerate(encoded):
            self.progress(f"{name}: prompt {index + 1} of {len(encoded)}")
            for label, variant in rotated(variants, index):
                table.add(label, variant(prompt, index))
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
            variants = {OFF: self._agentspec(OFF, sampling, speculation=False), COLD: self._cold("control", sampling)}
            there = list(rotated(variants, index))
            for turn, (label, variant) in enumerate((*there, *reversed(there))):
                table.add(label, variant(ids, 4 * index + turn))
        require_distinct(table.runs[OFF])
        return table

    def warm(self, counts: Sequence[int]) -> None:
        """Fill the caches of the warm tenants with answers to other prompts of the same kind."""
        others = [self.encode(text) for text in load_prompts("edit_warm")[: max(counts)]]
        for count in counts:
            self.record(warm_name(count), others[:count])

    def record(self, tenant: str, prompts: Sequence[Sequence[int]]) -> None:
        """Answer `prompts` for `tenant`, whose cache stores the answers."""
        for index, prompt in enumerate(prompts):
            self.progress(f"warming {tenant!r}: {index + 1} of {len(prompts)}")
            self.loop.run_until_complete(ask(self.backend, prompt, GREEDY, tenant, labels=Labels(f"warm-{index}")))

    def variants(self, table: str) -> dict[str, Variant]:
        warm = {name: self._agentspec(name, GREEDY) for name in map(warm_name, WARM_COUNTS)}
        return {
            TRANSFORMERS: lambda prompt, _: self.transformers(prompt, MAX_TOKENS),
            LOOKUP: lambda prompt, _: self.transformers(prompt, MAX_TOKENS, prompt_lookup_num_tokens=LOOKUP_TOKENS),
            OFF: self._agentspec(OFF, GREEDY, speculation=False),
            COLD: self._cold(table, GREEDY),
            **warm,
            SECOND: self._agentspec(second_tenant(table), GREEDY),
        }

    def _agentspec(self, tenant: str, sampling: SamplingParams, *, speculation: bool = True) -> Variant:
        def variant(prompt: Sequence[int], index: int) -> Run:
            labels = Labels(f"run-{index}")
            answer = ask(self.backend, prompt, sampling, tenant, labels=labels, speculation=speculation, store=False)
            return self.loop.run_until_complete(answer)

        return variant

    def _cold(self, table: str, sampling: SamplingParams) -> Variant:
        """A variant that uses a new tenant with an empty cache for each answer."""
        return lambda prompt, index: self._agentspec(f"{table}: {COLD} {index}", sampling)(prompt, index)


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
    tables: Sequence[RunTable]

    def show(self) -> Iterator[RenderableType]:
        for table in self.tables:
            yield _shown(table)
            yield from table.goal_lines(goals_of(table))

    def data(self) -> dict[str, Any]:
        return {"tables": [_data(table) for table in self.tables]}


def goals_of(table: RunTable) -> tuple[RatioGoal, ...]:
    return CONTROL_GOALS if table.name == "control" else EDIT_GOALS


def _baseline(table: RunTable) -> str:
    return TRANSFORMERS if TRANSFORMERS in table.runs else OFF


def _shown(table: RunTable) -> RenderableType:
    baseline = _baseline(table)
    title = f"{table.name}: {len(table.speeds(baseline))} prompts, {table.tokens(baseline)} answer tokens"
    columns = ("variant", "tok/s", f"vs {baseline}", "tokens/step", f"same as {OFF}")
    rows = [
        (
            variant,
            f"{table.total_speed(variant):.1f}",
            str(table.ratio(variant, baseline)),
            table.steps_cell(variant),
            table.same(variant, OFF),
        )
        for variant in table.runs
    ]
    return report.table(title, columns, rows)


def _data(table: RunTable) -> dict[str, Any]:
    baseline = _baseline(table)
    return {
        "name": table.name,
        "baseline": baseline,
        "ratios": table.ratio_data(dict.fromkeys(table.runs, baseline)),
        "goals": table.goal_data(goals_of(table)),
        "runs": table.run_data(),
    }
