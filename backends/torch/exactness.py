"""Checks whether speculation changes answers: runs the same requests without drafts, with drafts, and concurrently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from agentspec.backends.torch.backend import TorchBackend
from agentspec.backends.torch.engine.prefix_cache import common_prefix
from agentspec.backends.torch.engine.tasks import on_own_thread
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.distribution import gumbel_noise, position_key
from agentspec.types import GenerateRequest, Labels, SamplingParams

OFF, COLD, WARM, TOGETHER = "off", "on, cold", "on, warm", "on, side by side"
SIDE_BY_SIDE = 8  # concurrent requests
NEAR_TIE = {torch.float32: 1e-3, torch.float64: 1e-3}
COARSE_TIE = 0.5  # for types with fewer bits, where rounding alone changes logits by as much

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ExactnessCase:
    """A prompt's token ids and the sampling parameters of its answer; only temperature and seed may be set."""

    prompt: Sequence[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class TokenDivergence:
    """The first token in which an answer differs from the one without drafts; -1 stands for the answer's end.

    The gaps are differences between the scores of `off` and `on`, which are logits or, if the token is sampled, logits
    over the temperature plus noise. `gap_apart` comes from computing token by token, as without drafts, and
    `gap_together` from one forward over the whole text.
    """

    way: str
    question: int
    position: int
    off: int
    on: int
    gap_apart: float
    gap_together: float
    tie: float

    @property
    def is_tie(self) -> bool:
        """Whether the two tokens' scores are so close that the order of additions decides between them."""
        return min(abs(self.gap_apart), abs(self.gap_together)) < self.tie


@dataclass(slots=True)
class ExactnessReport:
    """The tokens of each way of answering, question by question (None: not answered yet), and where they diverge from
    those without drafts.
    """

    answers: dict[str, list[list[int] | None]] = field(default_factory=dict)
    divergences: list[TokenDivergence] = field(default_factory=list)

    def identical(self, way: str) -> int:
        pairs = zip(self.answers[way], self.answers[OFF], strict=True)
        return sum(one == other for one, other in pairs if one is not None)

    def answered(self, way: str) -> int:
        return sum(one is not None for one in self.answers[way])

    @property
    def exact(self) -> bool:
        return all(divergence.is_tie for divergence in self.divergences)


async def check_exactness(
    backend: TorchBackend, questions: Sequence[ExactnessCase], progress: Progress, found: ExactnessReport | None = None
) -> ExactnessReport:
    """Answer every question in four ways and compare the answers. The backend needs a token cache, and no other
    requests may use the backend at that time. Who cancels it has what was found until then in `found`.

    Answers are exact, as docs/engines.md defines it, if they are equal up to a near-tie. Raises as the backend does.
    """
    found = found or ExactnessReport()
    for way in (OFF, COLD, WARM, TOGETHER):
        gate = asyncio.Semaphore(SIDE_BY_SIDE if way == TOGETHER else 1)
        answers = found.answers[way] = [None] * len(questions)

        async def answer(number: int, way: str = way, gate: asyncio.Semaphore = gate) -> None:
            async with gate:
                progress(f"{way}: answer {found.answered(way) + 1} of {len(questions)}")
                found.answers[way][number] = await _answer(backend, way, number, questions[number])

        await asyncio.gather(*map(answer, range(len(questions))))
        for number, question in enumerate(questions):
            off, on = found.answers[OFF][number], answers[number]
            if off is not None and on is not None and on != off:
                progress(f"{way}: looking into answer {number + 1}")
                found.divergences.append(first_divergence(backend.target, question, way, number, off, on))
    return found


async def _answer(backend: TorchBackend, way: str, number: int, question: ExactnessCase) -> list[int]:
    """Answer one question. Its cold and warm answers share a tenant of their own; without drafts nothing is stored."""
    request = GenerateRequest(
        model=backend.model_name,
        token_ids=question.prompt,
        sampling=question.sampling,
        labels=Labels(session=f"{way} {number}"),
        tenant=OFF if way == OFF else f"question {number}",
        speculation=way != OFF,
        store=way != OFF,
    )
    return [token async for delta in backend.generate(request) for token in delta.token_ids]


def first_divergence(
    target: TargetModel, question: ExactnessCase, way: str, number: int, off: Sequence[int], on: Sequence[int]
) -> TokenDivergence:
    """Find where two different answers to a question diverge, and by how much. Computes on a thread of its own."""
    position = common_prefix(np.asarray(off), np.asarray(on))
    first, second = (answer[position] if position < len(answer) else -1 for answer in (off, on))
    apart = together = float("inf")
    if -1 not in (first, second):
        logits = on_own_thread(lambda: _logits(target, question.prompt, off[:position]))
        apart, together = (_gap(each, (first, second), question, position) for each in logits)
    tie = NEAR_TIE.get(target.dtype, COARSE_TIE)
    return TokenDivergence(way, number, position, first, second, apart, together, tie)


@torch.inference_mode()
def _logits(target: TargetModel, prompt: Sequence[int], written: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The logits [vocab] after prompt and answer, computed token by token and computed in one forward."""
    whole = target.forward(target.new_cache(len(prompt) + len(written)), [*prompt, *written])[0]
    cache = target.new_cache(len(prompt) + len(written))
    logits = target.forward(cache, prompt)[0]
    cache.commit(len(prompt), ())
    for token in written:
        logits = target.forward(cache, [token])[0]
        cache.commit(1, ())
    return logits, whole


def _gap(logits: Tensor, pair: Sequence[int], question: ExactnessCase, position: int) -> float:
    ids = torch.tensor(pair, device=logits.device)
    scores = logits[ids]
    sampling = question.sampling
    if not sampling.greedy:
        key = position_key(sampling.seed or 0, 0, len(question.prompt) + position)
        scores = scores / sampling.temperature + gumbel_noise(key, ids)
    return float(scores[0] - scores[1])
