"""Costs and gains of delegating steps: agentspec's own overhead, pipelining, the judge's call, and a prediction."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.report import Figure, Progress
from agentspec.benchmarks.thinking_model import ThinkingModel
from agentspec.errors import InvalidRequestError
from agentspec.reasoning.delegation.backend import DelegationBackend
from agentspec.reasoning.delegation.spec_reason import PREFILL
from agentspec.reasoning.delegation.spec_reason import QUESTION as SCORE_QUESTION
from agentspec.reasoning.delegation.thinking import Thinking
from agentspec.reasoning.settings import SpecReasonSettings
from agentspec.recordings.calls import json_objects
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Delta, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

STEPS = 40
STEP_SECONDS = 0.1
JUDGE_SHARE = 0.25
QUESTION = [{"role": "user", "content": "A farmer has 15 sheep and buys 7 more. How many sheep are there?"}]
PUBLISHED = (1.4, 3.0)
"""Speed-ups that the paper reports (arXiv 2504.07891) if the small model writes 38 to 80 % of the steps."""


class TimedBackend:
    """A backend that sums its own time: the seconds between the request for a delta and the delta."""

    def __init__(self, inner: FakeBackend) -> None:
        self._inner = inner
        self.capabilities = inner.capabilities
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        async with aclosing(self._inner.generate(request)) as deltas:
            while True:
                began = time.perf_counter()
                try:
                    delta = await anext(deltas)
                except StopAsyncIteration:
                    return
                finally:
                    self.seconds += time.perf_counter() - began
                yield delta


def run_reasoning(model: str | None, progress: Progress) -> ReasoningReport:
    """Measure overhead and pipelining and, if a local model is named, the judge's call on that model."""
    progress("the machinery")
    figures = [overhead()]
    for acceptance in (0.8, 1.0):
        progress(f"pipelining at acceptance {acceptance:g}")
        figures.append(pipelining(acceptance))
    if model is not None:
        from agentspec.backends.settings import TorchSettings
        from agentspec.backends.torch import TorchBackend

        progress("the judge's call")
        figures.append(score_cost(TorchBackend.load(TorchSettings(model=model))))
    return ReasoningReport(figures)


def overhead(rounds: int = 15) -> Figure:
    """Median over rounds of the milliseconds per step outside of model calls; the calls run one after another."""
    return Figure("machinery per step", statistics.median(_overhead() for _ in range(rounds)), "ms", 3.0)


def _overhead() -> float:
    base, small = TimedBackend(_model("base")), TimedBackend(_model("small"))
    settings = SpecReasonSettings(base="b", small="s", pipelined=False)
    steps, seconds = asyncio.run(_think(DelegationBackend.of(settings, base=base, small=small)))
    return 1000 * (seconds - base.seconds - small.seconds) / steps


def pipelining(acceptance: float, rounds: int = 3) -> Figure:
    """The speed-up by pipelining, on models that sleep; a score takes `JUDGE_SHARE` of the time of a step."""
    ratios = []
    for _ in range(rounds):
        plain, pipelined = (_asleep(acceptance, pipelined=pipelined) for pipelined in (False, True))
        ratios.append(plain / pipelined)
    return Figure(f"pipelined, acceptance {acceptance:g}", statistics.median(ratios), "x", 1.15, at_most=False)


def _asleep(acceptance: float, *, pipelined: bool) -> float:
    rejected = {n for n in range(STEPS) if math.floor((n + 1) * (1 - acceptance)) > math.floor(n * (1 - acceptance))}
    judged = iter(range(STEPS))

    def score(step: str) -> Answer:
        return Answer("1" if next(judged) in rejected else "9", first_latency=STEP_SECONDS * JUDGE_SHARE)

    base = _model("base", STEP_SECONDS, score=score)
    settings = SpecReasonSettings(base="b", small="s", pipelined=pipelined)
    return asyncio.run(_think(DelegationBackend.of(settings, base=base, small=_model("small", STEP_SECONDS))))[1]


def _model(word: str, seconds: float = 0.0, **options: Any) -> ThinkingModel:
    def step(thinking: str) -> Answer:
        number = thinking.count("\n\n") + 1
        words = " ".join(f"{word}{number}-{n}" for n in range(20))
        return Answer(f"{words}{' Answer: 22' if number == STEPS else ''}\n\n", first_latency=seconds)

    return ThinkingModel(step, **options)


async def _think(backend: DelegationBackend) -> tuple[int, float]:
    """Run the thinking without an answer; returns the number of steps and the seconds by the loop's clock."""
    request = GenerateRequest("fast", messages=QUESTION, sampling=SamplingParams(temperature=0.0))
    clock = asyncio.get_running_loop().time
    thinking, began = Thinking(request, backend.settings, backend.roles), clock()
    async with aclosing(backend.think(thinking)) as events:
        async for _ in events:
            pass
    return len(thinking.steps), clock() - began


def score_cost(backend: TorchBackend, rounds: int = 9) -> Figure:
    """The time of a score over cached thinking, relative to the engine's time for a prompt with as many new tokens."""
    ratios = asyncio.run(_score_cost(backend, rounds))
    return Figure("score, over the engine's own time", statistics.median(ratios), "x", 1.2)


async def _score_cost(backend: TorchBackend, rounds: int) -> list[float]:
    from agentspec.reasoning.delegation.model_role import ModelRole

    judge = ModelRole("judge", backend, backend.model_name)
    request = GenerateRequest(backend.model_name, messages=QUESTION, store=True)
    context = await judge.open(request, "")
    await context.extend("First, there are 15 sheep. Then 7 more are bought, so the farmer has 15 + 7 sheep.\n\n" * 8)
    ratios = []
    for number in range(rounds + 1):
        await context.extend(f"Step {number}: the sum of 15 and 7 is 22, since 15 + 5 is 20 and 2 more make 22.\n\n")
        await _seconds(judge, context.request(SamplingParams(temperature=0.0, max_tokens=1)))  # its KV slots are cached
        began = time.perf_counter()
        await judge.ask(context, SCORE_QUESTION, PREFILL, 60.0, lambda tokens: None)
        scored = time.perf_counter() - began
        plain = context.fork()
        await plain.extend(SCORE_QUESTION[::-1])
        asked = await context.ask(SCORE_QUESTION, PREFILL, SamplingParams())
        length = len(asked.token_ids or ())
        bare = plain.request(SamplingParams(temperature=0.0, max_tokens=1))
        ids = list(bare.token_ids or ())[:length]
        ids += ids[-1:] * (length - len(ids))
        own = await _seconds(judge, GenerateRequest(bare.model, token_ids=ids, sampling=bare.sampling))
        ratios.append(scored / own)
    return ratios[1:]


async def _seconds(judge: Any, request: GenerateRequest) -> float:
    began = time.perf_counter()
    async with aclosing(judge.deltas(request, 60.0)) as deltas:
        async for _ in deltas:
            pass
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of both models, and seconds of one score, which is a short prefill and one base-model token."""

    base: float
    small: float
    score_seconds: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted speed-ups over the base model alone, at one acceptance rate."""

    acceptance: float
    plain: float
    pipelined: float


def predict(steps: Sequence[int], speeds: Speeds, acceptances: Iterable[float]) -> list[Prediction]:
    """Predict the speed-up of a thinking with `steps` (tokens each) and evenly spread rejections.

    Plain: every step is drafted and scored, and the base model writes rejected steps. Pipelined: the draft after an
    accepted step is written while that step is scored, so that only the longer of score and draft counts.
    """
    alone = sum(steps) / speeds.base
    found = []
    for acceptance in acceptances:
        plain = pipelined = 0.0
        for tokens in steps:
            draft, rewrite = tokens / speeds.small, (1 - acceptance) * tokens / speeds.base
            plain += draft + speeds.score_seconds + rewrite
            behind = acceptance * max(draft, speeds.score_seconds) + (1 - acceptance) * (draft + speeds.score_seconds)
            pipelined += behind + rewrite
        found.append(Prediction(acceptance, alone / plain, alone / pipelined))
    return found


@dataclass(frozen=True, slots=True)
class NeededAcceptance:
    """The share of steps that has to be accepted for a speed-up of `speedup`; None where no share is enough."""

    speedup: float
    plain: float | None
    pipelined: float | None


def needed(steps: Sequence[int], speeds: Speeds, speedups: Iterable[float]) -> list[NeededAcceptance]:
    """The acceptance that each speed-up takes, by the arithmetic of `predict`, whose times are linear in it."""
    none, whole = predict(steps, speeds, [0.0, 1.0])

    def least(speedup: float, at_none: float, at_whole: float) -> float | None:
        share = (1 / at_none - 1 / speedup) / (1 / at_none - 1 / at_whole)
        return max(0.0, share) if share <= 1 else None

    return [
        NeededAcceptance(
            speedup, least(speedup, none.plain, whole.plain), least(speedup, none.pipelined, whole.pipelined)
        )
        for speedup in speedups
    ]


def read_steps(path: Path, characters_per_token: float = 4.0) -> list[int]:
    """Tokens of each step of recorded thinking: JSON lines with `reasoning` or `response`, plain or gzip-compressed."""
    steps = [
        max(1, round(len(step) / characters_per_token))
        for _, record in json_objects(path)
        for step in str(record.get("reasoning") or record.get("response") or "").split("\n\n")
        if step.strip()
    ]
    if not steps:
        raise InvalidRequestError(f"{path} holds no thinking: want lines with `reasoning` or `response`")
    return steps


@dataclass(slots=True)
class ReasoningReport:
    """All measurements and predictions."""

    figures: list[Figure] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    needed: list[NeededAcceptance] = field(default_factory=list)

    def foresee(self, steps: Sequence[int], speeds: Speeds) -> None:
        """Add the predictions for a thinking with `steps` (tokens each)."""
        self.predictions = predict(steps, speeds, [n / 10 for n in range(11)])
        self.needed = needed(steps, speeds, (1.0, *PUBLISHED))

    @property
    def met(self) -> bool:
        return all(figure.verdict == "met" for figure in self.figures)

    def show(self) -> Iterator[RenderableType]:
        if self.figures:
            yield report.table("step delegation", ("figure", "measured", "goal", ""), map(_row, self.figures))
        if self.predictions:
            rows = ([f"{value:.2f}" for value in (p.acceptance, p.plain, p.pipelined)] for p in self.predictions)
            columns = ("acceptance", "plain", "pipelined")
            yield report.table("predicted speed-up over the base model alone", columns, rows)
            yield f"Published, measured (arXiv 2504.07891): {PUBLISHED[0]:g} to {PUBLISHED[1]:g} times."
        if self.needed:
            rows = ([f"{n.speedup:g}x", *map(_share, (n.plain, n.pipelined))] for n in self.needed)
            yield report.table("acceptance that a speed-up takes", ("speed-up", "plain", "pipelined"), rows)

    def data(self) -> dict[str, Any]:
        figures = [
            {"name": f.name, "value": f.value, "unit": f.unit, "goal": f.required, "at_least": not f.at_most}
            for f in self.figures
        ]
        needed = list(map(asdict, self.needed))
        return {"figures": figures, "predictions": list(map(asdict, self.predictions)), "needed": needed}

    def plot(self, path: Path) -> None:
        """Plot the prediction over the published range."""
        with report.plot(path) as (axes,):
            axes.axhspan(*PUBLISHED, alpha=0.15, label="published, measured")
            at = [prediction.acceptance for prediction in self.predictions]
            axes.plot(at, [prediction.plain for prediction in self.predictions], label="predicted")
            axes.plot(at, [prediction.pipelined for prediction in self.predictions], "--", label="predicted, pipelined")
            axes.set_xlabel("share of steps accepted")
            axes.set_ylabel("times faster than the base model alone")
            axes.legend()


def _share(share: float | None) -> str:
    return "none is enough" if share is None else f"{share:.2f}"


def _row(figure: Figure) -> tuple[str, ...]:
    bound = f"{figure.sign} {figure.required:g} {figure.unit}"
    return figure.name, f"{figure.value:.2f} {figure.unit}", bound, "met" if figure.verdict == "met" else "MISSED"
