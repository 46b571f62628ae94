"""Decoding speed of one request at a time: transformers, agentspec off, agentspec on with colder and warmer caches.

Every variant answers the same token ids to the natural end of the text, one after another for each prompt and in an
order that rotates from prompt to prompt, so that a busy machine hits all of them alike. A pair is one prompt under
two variants; time is wall time including prefill. Each cache state of each table is a tenant of its own and no sequence
is added while it is measured, though how far drafts can be trusted goes on being learned, as it would in use; key/value
rows are never kept between calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks.stats import Ratio, distinct_ngrams, paired_ratio, rotated
from agentspec.benchmarks.transformers_peer import Peer
from agentspec.recordings.prompt_sets import PromptSet, load_prompts
from agentspec.types import GenerateRequest, Labels, SamplingParams, Speculation

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

MAX_TOKENS = 512
CONTROL_TOKENS = 128
CONTROL_ROUNDS = 4  # the same questions with other seeds: a difference of two per cent needs many pairs
CONTROL_DISTINCT = 0.95
WARM_COUNTS = (10, 100)
LOOKUP_TOKENS = 10
PREFIX_BYTES_OFF = 0

TRANSFORMERS, LOOKUP, OFF, COLD, SECOND = "transformers", "prompt lookup", "off", "on, cold", "on, second pass"


GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


def warm_name(count: int) -> str:
    """The variant and tenant whose cache holds the answers to `count` other prompts."""
    return f"on, after {count} others"


def other_drafters(*, ngram: bool, draft_model: str | None) -> dict[str, dict[str, Any]]:
    """The variants in which another drafter works alone, with the settings that make it so."""
    found: dict[str, dict[str, Any]] = {"on, ngram alone": {"drafters": ("ngram",)}} if ngram else {}
    if draft_model is not None:
        found[f"on, {draft_model} alone"] = {"drafters": ("model",), "draft_model": draft_model}
    return found


def second_tenant(table: str) -> str:
    return f"{table}: {SECOND}"


@dataclass(frozen=True, slots=True)
class Run:
    """One answer: its token ids, seconds from request to last token, and what speculation did."""

    tokens: tuple[int, ...]
    seconds: float
    speculation: Speculation | None = None


@dataclass(slots=True)
class Table:
    """Runs of one prompt set: each prompt was answered `turns` times in a row by each variant."""

    name: str
    runs: dict[str, list[Run]] = field(default_factory=dict)
    turns: int = 1

    def add(self, variant: str, run: Run) -> None:
        self.runs.setdefault(variant, []).append(run)

    def speeds(self, variant: str) -> list[float]:
        """Tokens a second of each prompt."""
        runs = self.runs[variant]
        turns = [runs[start : start + self.turns] for start in range(0, len(runs), self.turns)]
        return [sum(len(run.tokens) for run in group) / sum(run.seconds for run in group) for group in turns]

    def total_speed(self, variant: str) -> float:
        runs = self.runs[variant]
        return sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)

    def tokens_per_step(self, variant: str) -> float | None:
        counted = [run for run in self.runs[variant] if run.speculation]
        steps = sum(run.speculation.steps for run in counted if run.speculation)
        return sum(len(run.tokens) for run in counted) / steps if steps else None

    def identical(self, variant: str, baseline: str) -> int:
        """How many answers equal the baseline's, token for token."""
        pairs = zip(self.runs[variant], self.runs[baseline], strict=True)
        return sum(left.tokens == right.tokens for left, right in pairs)

    def ratio(self, variant: str, baseline: str) -> Ratio:
        return paired_ratio(self.speeds(variant), self.speeds(baseline))


Variant = Callable[[Sequence[int], int], Run]
Progress = Callable[[str], None]


def run_decode(
    model: str,
    *,
    sets: Sequence[PromptSet],
    limit: int | None,
    progress: Progress,
    ngram: bool = False,
    draft_model: str | None = None,
) -> list[Table]:
    """Measure every variant on the prompt sets and the control; one table each. Raises what the backend raises.

    `ngram` and `draft_model` add variants of the prompt sets in which that drafter is the only one.
    """
    bench = Bench.load(model, progress, other_drafters(ngram=ngram, draft_model=draft_model))
    try:
        bench.warm(WARM_COUNTS if sets else WARM_COUNTS[:1])  # so that drafters come to the control trusted
        tables = [bench.measure(name, load_prompts(name)[:limit]) for name in sets]
        return [*tables, bench.control(load_prompts("control")[:limit])]
    finally:
        bench.close()


@dataclass(slots=True)
class Bench:
    """One loaded model, its plain transformers twin, the warmed caches, and the same model with other drafters."""

    backend: TorchBackend
    peer: Peer
    loop: asyncio.AbstractEventLoop
    progress: Progress
    others: dict[str, TorchBackend] = field(default_factory=dict)

    @classmethod
    def load(cls, model: str, progress: Progress, others: Mapping[str, dict[str, Any]] | None = None) -> Bench:
        """`others` are further variants by name, each with settings that differ from the default ones."""
        from agentspec.backends.torch import TorchBackend
        from agentspec.cache import SuffixCache

        progress(f"loading {model}")
        settings = TorchSettings(model=model, prefix_bytes=PREFIX_BYTES_OFF)  # type: ignore[arg-type]
        backend = TorchBackend.load(settings, cache=SuffixCache.open())
        peer = Peer.beside(backend, model)
        different = {
            name: TorchBackend.load(settings.model_copy(update=update)) for name, update in (others or {}).items()
        }
        return cls(backend, peer, asyncio.new_event_loop(), progress, different)

    def close(self) -> None:
        self.peer.close()
        for backend in (self.backend, *self.others.values()):
            self.loop.run_until_complete(backend.aclose())
        self.loop.close()

    def measure(self, name: PromptSet, prompts: Sequence[str]) -> Table:
        table = Table(name)
        encoded = [self.backend.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
        self._record(second_tenant(name), encoded)
        self._transformers(encoded[0])  # its first call sets things up that later ones find ready
        variants = self._variants(name)
        for index, prompt in enumerate(encoded):
            self.progress(f"{name}: prompt {index + 1} of {len(encoded)}")
            for label, variant in rotated(variants, index):
                table.add(label, variant(prompt, index))
        return table

    def control(self, prompts: Sequence[str]) -> Table:
        """Sampled answers that do not repeat, speculation off and on; raises ValueError where they repeat after all.

        Each question is asked there and back (off, on, on, off): what drifts meanwhile hits both alike.
        """
        table = Table("control", turns=2)
        for index, prompt in enumerate([*prompts] * CONTROL_ROUNDS):
            self.progress(f"control: answer {index + 1} of {CONTROL_ROUNDS * len(prompts)}")
            ids = self.backend.encode_chat([{"role": "user", "content": prompt}])
            sampling = SamplingParams(temperature=1.0, seed=index, max_tokens=CONTROL_TOKENS)
            variants = {OFF: self._agentspec(OFF, sampling, speculation=False), COLD: self._cold("control", sampling)}
            there = list(rotated(variants, index))
            for turn, (label, variant) in enumerate((*there, *reversed(there))):
                table.add(label, variant(ids, 4 * index + turn))
        _require_distinct(table.runs[OFF])
        return table

    def warm(self, counts: Sequence[int]) -> None:
        """Fill the tenants that stand for caches warmed by other prompts of the kind."""
        others = [
            self.backend.encode_chat([{"role": "user", "content": text}])
            for text in load_prompts("edit_warm")[: max(counts)]
        ]
        for count in counts:
            self._record(warm_name(count), others[:count])

    def _record(self, tenant: str, prompts: Sequence[Sequence[int]]) -> None:
        for index, prompt in enumerate(prompts):
            self.progress(f"warming {tenant!r}: {index + 1} of {len(prompts)}")
            request = self._request(prompt, tenant, f"warm-{index}", GREEDY, speculation=True, store=True)
            self.loop.run_until_complete(collect(self.backend, request))

    def _variants(self, table: str) -> dict[str, Variant]:
        warm = {name: self._agentspec(name, GREEDY) for name in map(warm_name, WARM_COUNTS)}
        return {
            TRANSFORMERS: lambda prompt, _: self._transformers(prompt),
            LOOKUP: lambda prompt, _: self._transformers(prompt, prompt_lookup_num_tokens=LOOKUP_TOKENS),
            OFF: self._agentspec(OFF, GREEDY, speculation=False),
            COLD: self._cold(table, GREEDY),
            **warm,
            SECOND: self._agentspec(second_tenant(table), GREEDY),
            **{name: self._agentspec(name, GREEDY, backend=backend) for name, backend in self.others.items()},
        }

    def _agentspec(
        self, tenant: str, sampling: SamplingParams, *, speculation: bool = True, backend: TorchBackend | None = None
    ) -> Variant:
        def variant(prompt: Sequence[int], index: int) -> Run:
            request = self._request(prompt, tenant, f"run-{index}", sampling, speculation=speculation, store=False)
            return self.loop.run_until_complete(collect(backend or self.backend, request))

        return variant

    def _cold(self, table: str, sampling: SamplingParams) -> Variant:
        """A tenant of its own for each answer: nothing was ever said there."""
        return lambda prompt, index: self._agentspec(f"{table}: {COLD} {index}", sampling)(prompt, index)

    def _request(
        self,
        prompt: Sequence[int],
        tenant: str,
        session: str,
        sampling: SamplingParams,
        *,
        speculation: bool,
        store: bool,
    ) -> GenerateRequest:
        return GenerateRequest(
            model=self.backend.model_name,
            token_ids=prompt,
            sampling=sampling,
            labels=Labels(session=session),
            tenant=tenant,
            speculation=speculation,
            store=store,
        )

    def _transformers(self, prompt: Sequence[int], **options: int) -> Run:
        return Run(*self.peer.generate(prompt, MAX_TOKENS, **options))


async def collect(backend: TorchBackend, request: GenerateRequest) -> Run:
    """One answer with the time it took, from handing the request over to the last token."""
    tokens: list[int] = []
    stats: Speculation | None = None
    start = time.perf_counter()
    async for delta in backend.generate(request):
        tokens.extend(delta.token_ids)
        stats = delta.speculation or stats
    return Run(tuple(tokens), time.perf_counter() - start, stats)


def _require_distinct(runs: Sequence[Run]) -> None:
    """The control is one only if its text does not repeat: judged over all answers together."""
    shares = [distinct_ngrams(run.tokens) for run in runs]
    share = sum(shares) / len(shares)
    if share < CONTROL_DISTINCT:
        raise ValueError(
            f"the control repeats itself: {share:.3f} of its 4-grams are distinct, need {CONTROL_DISTINCT}"
        )
