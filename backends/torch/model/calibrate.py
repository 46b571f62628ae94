"""Times a few forwards when the model is loaded, so that the governor starts with this machine's costs."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.device import synchronize
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.model.target import TargetModel

SIZES = (1, 2, 4, 8, 16, 32, 48)
FAR = 1024  # KV slots of the long context
PASSES = 3
SEQUENCES = (4, 8)  # sequences in one forward


@torch.inference_mode()
def measure_costs(target: TargetModel, limit_seconds: float = 2.0) -> list[tuple[int, int, float]]:
    """Time forwards of every size in `SIZES`, as far as the limit allows; returns (tokens, context, seconds) samples.

    There is at least one sample, but none for a model that cannot be rewound.
    """
    if not target.rewindable:
        return []
    started = perf_counter()
    cache = target.new_cache(FAR + max(SIZES))
    assert isinstance(cache, SequenceCache)
    target.forward(cache, [0])
    samples: list[tuple[int, int, float]] = []
    sizes = [size for size in SIZES if size <= target.context_length]
    far = min(FAR, target.context_length - max(sizes))
    several = min(16, max(sizes))
    plan = [(size, 0) for _ in range(PASSES) for size in sizes] + [(1, far), (1, far), (several, far), (several, far)]
    for size, context in plan:
        if samples and perf_counter() - started > limit_seconds:
            break
        samples.append((size, context, _timed(target, cache, size, context)))
    return samples[1:] or samples


@torch.inference_mode()
def measure_batches(target: TargetModel) -> list[tuple[int, float]]:
    """Time forwards of one token for each of several sequences; returns (sequences, seconds) samples."""
    if not target.batched:
        return []
    items = [BatchItem(target.new_cache(1), [0]) for _ in range(max(SEQUENCES))]
    target.forward_batch(items)
    return [(count, _clocked(target, items[:count])) for count in SEQUENCES for _ in range(PASSES)]


def _timed(target: TargetModel, cache: SequenceCache, size: int, context: int) -> float:
    cache.fill_blank(context)
    return _clocked(target, [BatchItem(cache, [0], [0] * (size - 1), range(-1, size - 2))])


def _clocked(target: TargetModel, items: Sequence[BatchItem]) -> float:
    synchronize(target.device)
    started = perf_counter()
    target.forward_batch(items)[0][0, 0].item()
    return perf_counter() - started
