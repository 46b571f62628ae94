"""Trains a `JudgeHead` on pairs of a right and a wrong answer (Judge Decoding, arXiv 2501.19309, section 4.1)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from agentspec.backends.base import Floats
from agentspec.backends.torch.engine.prefix_cache import common_prefix
from agentspec.backends.torch.sampling.judge_head import JudgeHead
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.types import Message

HELD_OUT = 5  # every fifth pair only measures what the head has learned
L2 = 1e-3


class TrainableModel(Protocol):
    """What training needs of a `TorchBackend`."""

    @property
    def fingerprint(self) -> str: ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]: ...

    async def tokenize(self, text: str) -> list[int]: ...

    async def hidden_states(self, texts: Sequence[Sequence[int]]) -> list[Floats]: ...


@dataclass(frozen=True, slots=True)
class JudgePair:
    """A prompt with an answer that was accepted and one that was not, wrong from where it parts from the other."""

    prompt: str
    accepted: str
    rejected: str


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """`right` and `wrong` tokens were learned from; the recalls are the shares recognised in pairs held out."""

    right: int
    wrong: int
    right_recall: float
    wrong_recall: float


def read_pairs(path: Path) -> list[JudgePair]:
    """Read JSON lines with `prompt`, `accepted` and `rejected`. Raises `ConfigurationError` that names a bad line."""
    pairs: list[JudgePair] = []
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):  # texts may hold other ends of lines
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            pair = JudgePair(value["prompt"], value["accepted"], value["rejected"])
            if not all(isinstance(text, str) and text for text in (pair.prompt, pair.accepted, pair.rejected)):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            message = f"{path}:{number} must be a JSON object with the texts prompt, accepted and rejected"
            raise ConfigurationError(message) from None
        if pair.accepted == pair.rejected:
            raise ConfigurationError(f"{path}:{number}: accepted and rejected are the same text")
        pairs.append(pair)
    return pairs


async def train_judge(
    model: TrainableModel, pairs: Sequence[JudgePair], progress: Callable[[int], None] = lambda done: None
) -> tuple[JudgeHead, TrainingReport]:
    """Train a head for `model`; each pair takes a forward of its texts. The same pairs give the same head.

    Raises `ConfigurationError` for fewer pairs than can be held out, and `ContextLengthError` for a text too long.
    """
    if len(pairs) < HELD_OUT:
        raise ConfigurationError(f"training needs {HELD_OUT} pairs or more, not {len(pairs)}")
    learned: list[tuple[Tensor, Tensor]] = []
    held_out: list[tuple[Tensor, Tensor]] = []
    for number, pair in enumerate(pairs):
        (held_out if number % HELD_OUT == 0 else learned).append(await labelled_states(model, pair))
        progress(number + 1)
    states, labels = _joined(learned)
    if not 0 < float(labels.mean()) < 1:
        raise ConfigurationError("the pairs hold no wrong token: the rejected answers are the beginnings of the others")
    head = fit(states, labels, model.fingerprint)
    right_recall, wrong_recall = recalls(head, *_joined(held_out))
    right = int(labels.sum())
    return head, TrainingReport(right, len(labels) - right, right_recall, wrong_recall)


async def labelled_states(model: TrainableModel, pair: JudgePair) -> tuple[Tensor, Tensor]:
    """The hidden states [tokens, width] behind the tokens of both answers, and 1.0 for each token that is right."""
    prompt = model.encode_chat([{"role": "user", "content": pair.prompt}])
    accepted, rejected = await model.tokenize(pair.accepted), await model.tokenize(pair.rejected)
    if not (prompt and accepted and rejected):
        raise InvalidRequestError("a pair has an empty text", param="prompt")
    shared = common_prefix(np.asarray(accepted), np.asarray(rejected))
    found = await model.hidden_states([[*prompt, *accepted], [*prompt, *rejected]])
    right, wrong = (torch.from_numpy(states[len(prompt) :]).float() for states in found)
    # What both begin with is learned once.
    labels = torch.cat([torch.ones(len(accepted)), torch.zeros(len(rejected) - shared)])
    return torch.cat([right, wrong[shared:]]), labels


def fit(states: Tensor, labels: Tensor, fingerprint: str) -> JudgeHead:
    """Logistic regression with both classes weighing the same, on features of zero mean and unit variance."""
    mean, deviation = states.mean(0), states.std(0).clamp_min(1e-6)
    features = (states - mean) / deviation
    share = labels.mean()
    weights = torch.where(labels > 0, 0.5 / share, 0.5 / (1 - share))
    weight, bias = torch.zeros(states.shape[1], requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = functional.binary_cross_entropy_with_logits(features @ weight + bias, labels, weights)
        total: Tensor = found + L2 * weight.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        scaled = weight / deviation
        return JudgeHead(scaled, bias - scaled @ mean, fingerprint)


def recalls(head: JudgeHead, states: Tensor, labels: Tensor) -> tuple[float, float]:
    """The shares of right and of wrong tokens that the head takes for what they are; nan where there are none."""
    taken = (head.scores(states) > 0.5).float()
    return float(taken[labels > 0].mean()), float(1 - taken[labels == 0].mean())


def _joined(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    states, labels = zip(*parts, strict=True)
    return torch.cat(states), torch.cat(labels)
