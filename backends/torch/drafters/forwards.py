"""Runs the drafters of many answers side by side, so that those with a model share its forwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from time import perf_counter
from traceback import clear_frames
from typing import TypeVar

from torch import Tensor

from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.device import is_device_error, synchronize
from agentspec.backends.torch.model.target import TargetModel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DraftForward:
    """What a drafter asks for: a forward of `model` over `item`."""

    model: TargetModel
    item: BatchItem


@dataclass(frozen=True, slots=True)
class DraftLogits:
    """The `logits` [outputs, vocab] of a forward, and the drafter's share of the `seconds` that it took."""

    logits: Tensor
    seconds: float


Reply = DraftLogits | Exception
Drafting = Generator[DraftForward, DraftLogits, T]


def draft_together(draftings: Sequence[Drafting[T]]) -> list[T | Exception]:
    """Run all generators to their ends and return their results or errors. In every round the forwards that they ask
    of one model are computed as one. Raises errors of the device.
    """
    results: dict[int, T | Exception] = {}
    asked: dict[int, DraftForward] = {}
    replies: dict[int, Reply | None] = dict.fromkeys(range(len(draftings)))
    while replies:
        asked.clear()
        for index, reply in replies.items():
            try:
                asked[index] = _advanced(draftings[index], reply)
            except StopIteration as end:
                results[index] = end.value
            except Exception as error:
                if is_device_error(error):
                    raise
                results[index] = error
        replies = _computed(asked)
    return [results[index] for index in range(len(draftings))]


def draft_alone(drafting: Drafting[T]) -> T:
    """Run one generator to its end; raises what it raises."""
    (result,) = draft_together([drafting])
    if isinstance(result, Exception):
        raise result
    return result


def timed(drafting: Drafting[T]) -> Drafting[tuple[T, float]]:
    """`drafting`, with the seconds that it and its share of the forwards took, but not what others did in between."""
    seconds, started = 0.0, perf_counter()
    try:
        request = next(drafting)
        while True:
            seconds += perf_counter() - started
            try:
                reply = yield request
            except Exception as error:  # of the forward, which the drafter may do without
                started = perf_counter()
                request = drafting.throw(error)
                continue
            seconds += reply.seconds
            started = perf_counter()
            request = drafting.send(reply)
    except StopIteration as end:
        return end.value, seconds + perf_counter() - started


def _advanced(drafting: Drafting[T], reply: Reply | None) -> DraftForward:
    """What the generator asks for next. Raises `StopIteration` at its end."""
    if reply is None:
        return next(drafting)
    return drafting.throw(reply) if isinstance(reply, Exception) else drafting.send(reply)


def _computed(asked: dict[int, DraftForward]) -> dict[int, Reply | None]:
    groups: defaultdict[TargetModel, dict[int, BatchItem]] = defaultdict(dict)
    for index, forward in asked.items():
        groups[forward.model][index] = forward.item
    replies: dict[int, Reply | None] = {}
    for model, items in groups.items():
        found = _forward(model, list(items.values()))
        replies |= zip(items, found, strict=True)
    return replies


def _forward(model: TargetModel, items: list[BatchItem]) -> Sequence[Reply]:
    """One forward for all items; if it fails, one for each, so that only those that fail again get an error."""
    started = perf_counter()
    try:
        outputs = model.forward_batch(items)
        synchronize(model.device)  # so that the time counts as drafting and not as part of the next step
    except Exception as error:
        if is_device_error(error):
            raise
        if len(items) == 1:
            return [error]
        clear_frames(error.__traceback__)  # they keep the tensors of the failed forward
    else:
        share = (perf_counter() - started) / len(items)
        return [DraftLogits(logits, share) for logits in outputs]
    return [reply for item in items for reply in _forward(model, [item])]
