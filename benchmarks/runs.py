"""Times answers of the local engine and of transformers, and compares variants on the same prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks.report import Progress, Ratio, RatioGoal, paired_ratio
from agentspec.types import GenerateRequest, Labels, SamplingParams, Speculation

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

NO_LABELS = Labels()
TRANSFORMERS, OFF, COLD = "transformers", "off", "on, cold"


def warm_name(count: int) -> str:
    """The name of the variant and tenant whose cache holds the answers to `count` other prompts."""
    return f"on, after {count} others"


@dataclass(frozen=True, slots=True)
class Run:
    """One answer: its token ids, the seconds from request to last token, and its speculation counts."""

    tokens: tuple[int, ...]
    seconds: float
    speculation: Speculation | None = None


@dataclass(slots=True)
class RunTable:
    """Runs of one prompt set. Each variant answered each prompt `turns` times in a row."""

    name: str
    runs: dict[str, list[Run]] = field(default_factory=dict)
    turns: int = 1

    def add(self, variant: str, run: Run) -> None:
        self.runs.setdefault(variant, []).append(run)

    def speeds(self, variant: str) -> list[float]:
        """Tokens per second for each prompt."""
        runs = self.runs[variant]
        turns = [runs[start : start + self.turns] for start in range(0, len(runs), self.turns)]
        return [sum(len(run.tokens) for run in group) / sum(run.seconds for run in group) for group in turns]

    def total_speed(self, variant: str) -> float:
        return self.tokens(variant) / sum(run.seconds for run in self.runs[variant])

    def tokens(self, variant: str) -> int:
        """The number of tokens in all answers together."""
        return sum(len(run.tokens) for run in self.runs[variant])

    def tokens_per_step(self, variant: str) -> float | None:
        counted = [run for run in self.runs[variant] if run.speculation]
        steps = sum(run.speculation.steps for run in counted if run.speculation)
        return sum(len(run.tokens) for run in counted) / steps if steps else None

    def identical(self, variant: str, baseline: str) -> int:
        """How many answers equal the baseline's, token for token."""
        pairs = zip(self.runs[variant], self.runs[baseline], strict=True)
        return sum(left.tokens == right.tokens for left, right in pairs)

    def same(self, variant: str, baseline: str) -> str:
        return f"{self.identical(variant, baseline)}/{len(self.runs[variant])}"

    def steps_cell(self, variant: str) -> str:
        per_step = self.tokens_per_step(variant)
        return f"{per_step:.2f}" if per_step else ""

    def ratio(self, variant: str, baseline: str) -> Ratio:
        return paired_ratio(self.speeds(variant), self.speeds(baseline))

    def verdict(self, goal: RatioGoal) -> str:
        return self.ratio(goal.variant, goal.baseline).verdict(goal.required)

    def goal_lines(self, goals: Iterable[RatioGoal]) -> Iterator[str]:
        return (goal.line(self.ratio(goal.variant, goal.baseline)) for goal in goals)

    def goal_data(self, goals: Iterable[RatioGoal]) -> list[dict[str, Any]]:
        return [
            {"variant": g.variant, "baseline": g.baseline, "least": g.required, "verdict": self.verdict(g)}
            for g in goals
        ]

    def ratio_data(self, baselines: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """The ratio of each variant to its baseline."""
        return {variant: asdict(self.ratio(variant, baseline)) for variant, baseline in baselines.items()}

    def run_data(self) -> dict[str, list[dict[str, Any]]]:
        return {variant: [asdict(run) for run in runs] for variant, runs in self.runs.items()}


async def ask(
    backend: TorchBackend,
    prompt: Sequence[int],
    sampling: SamplingParams,
    tenant: str,
    *,
    labels: Labels = NO_LABELS,
    **options: bool,
) -> Run:
    """Request one answer and measure the time to its last token.

    `options` sets the request's `speculation` and `store`.
    """
    request = GenerateRequest(
        backend.model_name,
        token_ids=prompt,
        sampling=sampling,
        labels=labels,
        tenant=tenant,
        **cast(Any, options),
    )
    tokens: list[int] = []
    stats: Speculation | None = None
    start = time.perf_counter()
    async for delta in backend.generate(request):
        tokens.extend(delta.token_ids)
        stats = delta.speculation or stats
    return Run(tuple(tokens), time.perf_counter() - start, stats)


@dataclass(slots=True)
class EngineBench:
    """One loaded model with a cache in memory, and the same model under plain transformers."""

    backend: TorchBackend
    peer: TransformersPeer
    loop: asyncio.AbstractEventLoop
    progress: Progress

    @classmethod
    def load(cls, model: str, progress: Progress, *, keeps_prefixes: bool = True) -> Self:
        """Without `keeps_prefixes` no KV slots are kept from one answer to the next. Raises what loading raises."""
        from agentspec.backends.torch import TorchBackend
        from agentspec.cache import SuffixCache

        progress(f"loading {model}")
        cache = SuffixCache.open()
        backend = TorchBackend.load(TorchSettings(model=model), cache=cache, keeps_prefixes=keeps_prefixes)
        return cls(backend, TransformersPeer.beside(backend, model), asyncio.new_event_loop(), progress)

    def close(self) -> None:
        self.peer.close()
        self.loop.run_until_complete(self.backend.aclose())
        self.loop.close()

    def encode(self, text: str) -> list[int]:
        return self.backend.encode_chat([{"role": "user", "content": text}])

    def transformers(self, prompt: Sequence[int], max_tokens: int, **options: int) -> Run:
        return Run(*self.peer.generate(prompt, max_tokens, **options))


_model: Any = None  # set only in the peer's process
_kept: tuple[list[int], Any] = ([], None)  # also: the tokens and the KV cache of the latest answer


class TransformersPeer:
    """A model with the same weights, device and arithmetic under plain transformers. `close` ends its process."""

    def __init__(self, folder: Path, *, device: str, dtype: str) -> None:
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _load, (folder, device, dtype))

    @classmethod
    def beside(cls, backend: TorchBackend, model: str) -> TransformersPeer:
        """Start transformers with `model`, on the device and with the arithmetic of `backend`."""
        from agentspec.backends.model_store import resolve

        dtype = str(backend.target.dtype).removeprefix("torch.")
        return cls(resolve(model).folder, device=str(backend.target.device), dtype=dtype)

    def generate(self, prompt: Sequence[int], max_tokens: int, **options: int) -> tuple[tuple[int, ...], float]:
        """A greedy answer to `prompt`, and the seconds it took, prefill included. `options` go to `generate`."""
        return self._process.submit(_generate, list(prompt), max_tokens, options).result()

    def continue_from(self, prompt: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], float]:
        """Like `generate`, but reuses the previous call's KV cache for the prefix that it shares with `prompt`."""
        return self._process.submit(_continue, list(prompt), max_tokens).result()

    def close(self) -> None:
        self._process.shutdown()


def _load(folder: Path, device: str, dtype: str) -> None:
    global _model
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    _model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    _model.to(device).eval()


def _generate(prompt: list[int], max_tokens: int, options: dict[str, Any]) -> tuple[tuple[int, ...], float]:
    import torch

    ids = torch.tensor([prompt], device=_model.device)
    start = time.perf_counter()
    with torch.inference_mode():
        output = _model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, **options
        )
    seconds = time.perf_counter() - start
    return tuple(output[0, len(prompt) :].tolist()), seconds


def _continue(prompt: list[int], max_tokens: int) -> tuple[tuple[int, ...], float]:
    global _kept
    from transformers import DynamicCache

    from agentspec.backends.torch.engine.prefix_cache import common_prefix

    start = time.perf_counter()
    text, rows = _kept
    shared = min(common_prefix(np.asarray(text), np.asarray(prompt)), len(prompt) - 1)
    if not shared:
        rows = DynamicCache(config=_model.config)
    elif shared < len(text):
        rows.crop(shared - len(text))
    tokens, _ = _generate(prompt, max_tokens, {"past_key_values": rows})
    _kept = ([*prompt, *tokens][: rows.get_seq_length()], rows)
    return tokens, time.perf_counter() - start
