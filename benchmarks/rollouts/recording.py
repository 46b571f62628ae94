"""Records samples of problems, for replays: JSON lines, a problem each, with token ids.

`{"problem": id, "prompt": [...], "samples": {"1.0": [[...], ...], "0.8": [...]}}`: the samples by temperature.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentspec.benchmarks.report import Progress
from agentspec.cache.tokens import Tokens
from agentspec.errors import ConfigurationError
from agentspec.types import SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

COOLING = (1.0, 0.8, 0.6, 0.4)
"""Temperatures of the epochs of a policy that drifts, over that of the first: it grows surer, as trained ones do."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """A prompt and its samples by temperature, the highest first."""

    problem: str
    prompt: Tokens
    samples: Mapping[float, Sequence[Tokens]]

    def epoch(self, number: int, size: int, *, drifts: bool) -> Sequence[Tokens]:
        """The `size` samples of an epoch, from 0 on, of one policy or of one that `drifts`."""
        several = list(self.samples.values())
        return several[number][:size] if drifts else several[0][number * size : (number + 1) * size]


def read_problems(files: Sequence[Path], count: int) -> list[tuple[str, str]]:
    """The first `count` problems (id, text) of JSON lines with "id" and "problem", of each file in turn."""
    columns = []
    for file in files:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            columns.append([json.loads(line) for _, line in zip(range(count), lines, strict=False)])
    rows = [one for one in chain.from_iterable(zip_longest(*columns)) if one is not None]
    return [(str(row["id"]), row["problem"]) for row in rows[:count]]


def read_rollouts(file: Path, size: int, epochs: int) -> list[Rollouts]:
    """The recorded problems. Raises `ConfigurationError` where there are too few samples for `epochs` of `size`."""
    found = [_rollouts(json.loads(line)) for line in file.read_text().splitlines()]
    for one in found:
        counts = [len(several) for several in one.samples.values()][:epochs]
        if len(counts) < epochs or counts[0] < size * epochs or min(counts) < size:
            raise ConfigurationError(f"{file}: {one.problem} has too few samples for {epochs} epochs of {size}")
    if not found:
        raise ConfigurationError(f"{file} holds no rollouts: record some with --problems")
    return found


def _rollouts(row: dict[str, Any]) -> Rollouts:
    arrays = {float(warmth): [_tokens(one) for one in several] for warmth, several in row["samples"].items()}
    return Rollouts(row["problem"], _tokens(row["prompt"]), dict(sorted(arrays.items(), reverse=True)))


def _tokens(ids: Iterable[int]) -> Tokens:
    return np.array(ids, dtype=np.int32)


def record(
    backend: TorchBackend,
    problems: Sequence[tuple[str, str]],
    out: Path,
    *,
    size: int,
    epochs: int,
    temperature: float,
    max_tokens: int,
    progress: Progress,
) -> None:
    """Add the samples of those problems to `out` that it does not hold yet, a problem at a time, the first epoch's at
    `temperature`.
    """
    done = {json.loads(line)["problem"] for line in out.read_text().splitlines()} if out.exists() else set()
    for number, (problem, text) in enumerate(problems):
        if problem in done:
            continue
        progress(f"sampling problem {number + 1} of {len(problems)}")
        prompt = backend.encode_chat([{"role": "user", "content": text}])
        warmths = [round(temperature * share, 3) for share in COOLING[:epochs]]
        counts = dict.fromkeys(warmths, size) | {warmths[0]: size * epochs}
        samples = _sample(
            backend, prompt, [warmth for warmth, count in counts.items() for _ in range(count)], max_tokens
        )
        taken = iter(samples)
        by = {str(warmth): [next(taken) for _ in range(count)] for warmth, count in counts.items()}
        with out.open("a") as file:
            file.write(json.dumps({"problem": problem, "prompt": list(prompt), "samples": by}) + "\n")


def _sample(backend: TorchBackend, prompt: Sequence[int], warmths: Sequence[float], length: int) -> list[list[int]]:
    """An answer of at most `length` tokens for each temperature, all in one batch."""
    import torch

    from agentspec.backends.torch.model.batch import BatchItem
    from agentspec.backends.torch.model.kv_cache import RowsPart, SequenceCache
    from agentspec.backends.torch.sampling.sampler import Sampler
    from agentspec.backends.torch.text.model_text import ids_of_end

    target = backend.target
    ends = ids_of_end(target.module.generation_config, backend.tokenizer)
    with torch.inference_mode():
        read = target.new_cache(len(prompt) + length)
        logits = target.forward(read, prompt)[-1]
        read.commit(len(prompt), ())
        params = [SamplingParams(temperature=warmth, seed=0, max_tokens=length) for warmth in warmths]
        samplers = [
            Sampler(one, target.vocab_size, prompt, target.device, choice=choice) for choice, one in enumerate(params)
        ]
        part = RowsPart(read.rows(0, read.length), read.length, release=False)
        rows = [SequenceCache.joined([part], read.capacity) for _ in warmths]
        answers: list[list[int]] = [[] for _ in warmths]
        running, behind = list(range(len(warmths))), [logits for _ in warmths]
        while running:
            for one, last in zip(running, behind, strict=True):
                samplers[one].begin(last[None])
                answers[one].append(token := samplers[one].choose(0))
                samplers[one].observe(token)
            running = [one for one in running if answers[one][-1] not in ends and len(answers[one]) < length]
            fresh = (
                target.forward_batch([BatchItem(rows[one], answers[one][-1:]) for one in running]) if running else []
            )
            for one in running:
                rows[one].commit(1, ())
            behind = [row[-1] for row in fresh]
    return answers
