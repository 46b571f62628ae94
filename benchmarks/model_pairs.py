"""What delegating steps of thinking can bring to a pair of models: arithmetic on the ratio of their speeds.

Decoding for one client is bound by the memory that a token reads, so that the ratio is at most that of the active
parameters. Times are in tokens of the base model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.reasoning import Speeds, needed, predict
from agentspec.reasoning.delegation.lookahead import DepthPlanner

STEP_TOKENS = 18  # of recorded mathematical thinking, on average
SCORE_TOKENS = 2.0
SPEEDUPS = (1.0, 1.4, 2.0)
ACCEPTED = (0.38, 0.8)  # the shares of steps that SpecReason's authors measured
BASE_SHARE = 0.2  # of the words of Speculative Thinking that the base model writes
PARAGRAPH, LOOK = 40, 20  # tokens, of which the first are looked at and drawn again
DEPTH, KEPT = 4, (0.4, 0.6)  # of Lookahead Reasoning
COLUMNS = (
    *("pair", "ratio", "1.0x needs", "1.4x needs", "2.0x needs", "SpecReason at 0.8", "Speculative Thinking"),
    *("Lookahead at 0.4", "at 0.6", "worth a try"),
)


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A base and a small model, `ratio` times as fast."""

    name: str
    ratio: float

    @classmethod
    def of(cls, base: str, small: str) -> ModelPair:
        """Two of the models in `PARAMETERS`."""
        return cls(f"{base} + {small}", PARAMETERS[base] / PARAMETERS[small])


PARAMETERS = {
    "QwQ-32B": 32.8,
    "R1-Distill-Qwen-1.5B": 1.78,
    "DeepSeek-R1": 37.0,
    "R1-Distill-Qwen-7B": 7.6,
    "Qwen3-32B": 32.8,
    "Qwen3-1.7B": 1.7,
    "Qwen3-4B": 4.0,
    "Qwen3-30B-A3B": 3.3,
    "Qwen3-235B-A22B": 22.0,
    "Qwen3.5-0.8B": 0.8,
    "Qwen3.5-2B": 2.0,
    "Qwen3.5-4B": 4.0,
    "Qwen3.5-9B": 9.0,
    "Qwen3.5-27B": 27.0,
    "Qwen3.5-35B-A3B": 3.0,
    "Qwen3.5-122B-A10B": 10.0,
    "Qwen3.5-397B-A17B": 17.0,
    "Gemma 4 31B": 31.0,
    "Gemma 4 26B-A4B": 4.0,
    "Gemma 4 E2B": 2.0,
    "gpt-oss-120b": 5.1,
    "gpt-oss-20b": 3.6,
}
"""Billions of parameters that a token reads: of the model cards, or as the names say."""
PAIRS = tuple(
    ModelPair.of(base, small)
    for base, small in (
        ("QwQ-32B", "R1-Distill-Qwen-1.5B"),
        ("DeepSeek-R1", "R1-Distill-Qwen-7B"),
        ("Qwen3-32B", "Qwen3-1.7B"),
        ("Qwen3-32B", "Qwen3-30B-A3B"),
        ("Qwen3-235B-A22B", "Qwen3-4B"),
        ("Qwen3.5-27B", "Qwen3.5-2B"),
        ("Qwen3.5-27B", "Qwen3.5-4B"),
        ("Qwen3.5-27B", "Qwen3.5-35B-A3B"),
        ("Qwen3.5-122B-A10B", "Qwen3.5-2B"),
        ("Qwen3.5-397B-A17B", "Qwen3.5-2B"),
        ("Qwen3.5-397B-A17B", "Qwen3.5-9B"),
        ("Qwen3.5-35B-A3B", "Qwen3.5-0.8B"),
        ("Gemma 4 31B", "Gemma 4 E2B"),
        ("Gemma 4 31B", "Gemma 4 26B-A4B"),
        ("Gemma 4 26B-A4B", "Gemma 4 E2B"),
        ("gpt-oss-120b", "gpt-oss-20b"),
    )
)


@dataclass(frozen=True, slots=True)
class PairForecast:
    """Speed-ups over the base model alone, and `needed`: SpecReason's acceptance for each of `SPEEDUPS`, or None.

    `worth_a_try` in SpecReason: "yes" if nothing is lost at the smaller share of accepted steps that was published and
    1.4x are gained at the larger; "if accepted" if only the second holds; "no" if not even that.
    """

    pair: str
    ratio: float
    needed: tuple[float | None, ...]
    spec_reason: float
    speculative_thinking: float
    lookahead: tuple[float, ...]

    @property
    def worth_a_try(self) -> str:
        nothing_lost, gained = (share if share is not None else 2.0 for share in self.needed[:2])
        if gained > ACCEPTED[1]:
            return "no"
        return "yes" if nothing_lost <= ACCEPTED[0] else "if accepted"

    def row(self) -> tuple[str, ...]:
        gains = (self.spec_reason, self.speculative_thinking, *self.lookahead)
        shares = ("-" if share is None else f"{share:.2f}" for share in self.needed)
        return self.pair, f"{self.ratio:.1f}", *shares, *(f"{gain:.2f}x" for gain in gains), self.worth_a_try


def forecast(pair: ModelPair, step_tokens: int = STEP_TOKENS, score_tokens: float = SCORE_TOKENS) -> PairForecast:
    """The figures of one pair; a score takes as long as `score_tokens` tokens of the base model."""
    steps, speeds = [step_tokens], Speeds(1.0, pair.ratio, score_tokens)
    return PairForecast(
        pair.name,
        pair.ratio,
        tuple(found.pipelined for found in needed(steps, speeds, SPEEDUPS)),
        predict(steps, speeds, [ACCEPTED[1]])[0].pipelined,
        _speculative_thinking(pair.ratio),
        tuple(_lookahead(pair.ratio, kept) for kept in KEPT),
    )


def _speculative_thinking(ratio: float) -> float:
    """A paragraph over the time of its parts: the base model's words, and the small one's, the first of them twice."""
    return PARAGRAPH / (PARAGRAPH * BASE_SHARE + (PARAGRAPH * (1 - BASE_SHARE) + LOOK) / ratio)


def _lookahead(ratio: float, kept: float) -> float:
    """As the planner of the depth counts, where all of the window's base-model calls take no longer than one."""
    return DepthPlanner(DEPTH, kept, draft_seconds=1 / ratio, own_seconds={DEPTH: 1.0}).rate(DEPTH)


@dataclass(slots=True)
class PairReport:
    """The figures of several pairs."""

    forecasts: Sequence[PairForecast] = field(default_factory=list)

    @classmethod
    def of(
        cls, pairs: Sequence[ModelPair] = PAIRS, step_tokens: int = STEP_TOKENS, score_tokens: float = SCORE_TOKENS
    ) -> PairReport:
        return cls([forecast(pair, step_tokens, score_tokens) for pair in pairs])

    def show(self) -> Iterator[RenderableType]:
        yield report.table("computed, not measured", COLUMNS, (one.row() for one in self.forecasts))

    def data(self) -> dict[str, Any]:
        return {"pairs": [{**asdict(one), "worth_a_try": one.worth_a_try} for one in self.forecasts]}
