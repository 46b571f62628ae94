"""Trains a `JudgeHead` on pairs of a right and a wrong answer (Judge Decoding, arXiv 2501.19309, section 4.1).

python -m agentspec.benchmarks.judge_training PAIRS.jsonl OUT.safetensors --backend NAME --config agentspec.toml
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.engine.prefix_cache import common_prefix
from agentspec.backends.torch.sampling.acceptance import JudgeHead
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.settings.load import load_settings

HELD_OUT = 5  # every fifth pair only measures what the head has learned
L2 = 1e-3


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


async def train_judge(model: TorchBackend, pairs: Sequence[JudgePair]) -> tuple[JudgeHead, TrainingReport]:
    """Train a head for `model`; each pair takes a forward of its texts. The same pairs give the same head.

    Raises `ConfigurationError` for fewer pairs than can be held out, and `ContextLengthError` for a text too long.
    """
    if len(pairs) < HELD_OUT:
        raise ConfigurationError(f"training needs {HELD_OUT} pairs or more, not {len(pairs)}")
    learned: list[tuple[Tensor, Tensor]] = []
    held_out: list[tuple[Tensor, Tensor]] = []
    for number, pair in enumerate(pairs):
        (held_out if number % HELD_OUT == 0 else learned).append(await labelled_states(model, pair))
    states, labels = _joined(learned)
    if not 0 < float(labels.mean()) < 1:
        raise ConfigurationError("the pairs hold no wrong token: the rejected answers are the beginnings of the others")
    head = fit(states, labels, model.fingerprint)
    right_recall, wrong_recall = recalls(head, *_joined(held_out))
    right = int(labels.sum())
    return head, TrainingReport(right, len(labels) - right, right_recall, wrong_recall)


async def labelled_states(model: TorchBackend, pair: JudgePair) -> tuple[Tensor, Tensor]:
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Train for the model, adapter, dtype and device of a configured backend. Raises `ConfigurationError`."""
    parser = argparse.ArgumentParser(description="Train the judge of lossy acceptance.")
    parser.add_argument("pairs", type=Path, help="lines with prompt, accepted and rejected")
    parser.add_argument("out", type=Path, help="the file for judge_head")
    parser.add_argument("--backend", required=True, help="a [backends.NAME] with kind = torch")
    parser.add_argument("--config", type=Path, help="agentspec.toml")
    asked = parser.parse_args(arguments)
    settings = load_settings(asked.config).backends.get(asked.backend)
    if not isinstance(settings, TorchSettings):
        raise ConfigurationError(f'the configuration has no [backends.{asked.backend}] with kind = "torch"')
    without_drafts = {"max_draft_tokens": 0, "draft_model": None}
    asyncio.run(_train(settings.model_copy(update=without_drafts), read_pairs(asked.pairs), asked.out))


async def _train(settings: TorchSettings, pairs: Sequence[JudgePair], out: Path) -> None:
    model = TorchBackend.load(settings)
    try:
        head, report = await train_judge(model, pairs)
    finally:
        await model.aclose()
    head.save(out)
    recognised = f"{report.right_recall:.0%} and {report.wrong_recall:.0%}"
    print(
        f"{out}: {report.right} right and {report.wrong} wrong tokens; of those held out, {recognised} are recognised"
    )


if __name__ == "__main__":
    main()
