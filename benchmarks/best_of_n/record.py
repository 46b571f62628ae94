"""Records the data of best-of-N replays: sampled answers, and the model's distribution at every token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.backends.torch.text.model_text import ids_of_end
from agentspec.benchmarks.best_of_n.replay import SampledAnswer, SampledQuestion, TopTokens
from agentspec.benchmarks.report import Progress
from agentspec.types import SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend
    from agentspec.backends.torch.model.target import TargetModel

TOP = 16  # tokens of each distribution that are kept


@dataclass(slots=True)
class AnswerInProgress:
    """An unfinished answer. Its next token will be drawn from `logits` [vocab]."""

    rows: SequenceCache
    sampler: Sampler
    logits: Tensor
    tokens: list[int] = field(default_factory=list)
    seen: list[TopTokens] = field(default_factory=list)

    def draw(self) -> int:
        self.seen.append(likeliest(self.logits[None]))
        self.sampler.begin(self.logits[None])
        token = self.sampler.choose(0)
        self.sampler.observe(token)
        self.tokens.append(token)
        return token

    @property
    def answer(self) -> SampledAnswer:
        ids = np.concatenate([row.ids for row in self.seen])
        logprobs = np.concatenate([row.logprobs for row in self.seen])
        return SampledAnswer(np.array(self.tokens, dtype=np.int32), TopTokens(ids, logprobs))


@dataclass(frozen=True, slots=True)
class AnswerRecorder:
    """Records a backend's answers at one temperature; every question has its own seed."""

    backend: TorchBackend
    temperature: float
    max_tokens: int
    progress: Progress

    def record(self, questions: Sequence[str], choices: int) -> list[SampledQuestion]:
        return [self._answered(index, text, choices) for index, text in enumerate(questions)]

    def _answered(self, index: int, text: str, choices: int) -> SampledQuestion:
        self.progress(f"temperature {self.temperature:g}: {choices} answers to question {index + 1}")
        prompt = self.backend.encode_chat([{"role": "user", "content": text}])
        ends = ids_of_end(self.backend.target.module.generation_config, self.backend.tokenizer)
        sampling = SamplingParams(temperature=self.temperature, seed=index, max_tokens=self.max_tokens)
        return record(self.backend.target, prompt, sampling, ends, choices)


@torch.inference_mode()
def record(
    target: TargetModel,
    prompt: Sequence[int],
    sampling: SamplingParams,
    ends: frozenset[int],
    choices: int,
) -> SampledQuestion:
    """Record `choices` answers to `prompt`, one forward per token, drawn as the engine draws them with this seed."""
    assert sampling.seed is not None and sampling.max_tokens is not None, "a replay draws with the same noise again"
    length = sampling.max_tokens
    rows = target.new_cache(len(prompt) + length)
    logits = target.forward(rows, prompt[:1], prompt[1:], range(-1, len(prompt) - 2))
    rows.commit(1, range(len(prompt) - 1))
    answers = [_begun(target, prompt, sampling, choice, rows, logits[-1]) for choice in range(choices)]
    running = answers
    while running := [one for one in running if one.draw() not in ends and len(one.tokens) < length]:
        fresh = target.forward_batch([BatchItem(one.rows, one.tokens[-1:]) for one in running])
        for one, row in zip(running, fresh, strict=True):
            one.rows.commit(1, ())
            one.logits = row[0]
    tokens = np.array(prompt, dtype=np.int32)
    return SampledQuestion(
        tokens, [one.answer for one in answers], sampling.temperature, sampling.seed, likeliest(logits)
    )


def _begun(
    target: TargetModel,
    prompt: Sequence[int],
    sampling: SamplingParams,
    choice: int,
    rows: SequenceCache,
    logits: Tensor,
) -> AnswerInProgress:
    sampler = Sampler(sampling, target.vocab_size, prompt, target.device, choice=choice)
    return AnswerInProgress(rows.copy(rows.length, rows.capacity), sampler, logits)


def likeliest(logits: Tensor) -> TopTokens:
    """The `TOP` likeliest tokens of logits [rows, vocab]."""
    best = logits.log_softmax(-1).topk(TOP)
    return TopTokens(best.indices.cpu().numpy().astype(np.int32), best.values.cpu().numpy())
