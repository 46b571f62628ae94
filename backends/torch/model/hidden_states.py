"""Forwards that also return hidden states: what the output head reads after every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentspec.backends.torch.model.batch import BatchItem, logit_rows
from agentspec.backends.torch.model.target import TargetModel


@torch.inference_mode()
def forward_with_states(target: TargetModel, items: Sequence[BatchItem]) -> list[tuple[Tensor, Tensor]]:
    """`TargetModel.forward_batch`, with the hidden states [outputs, width] in float32 that the output head read.

    Recorded forwards do not show these states, so that none is replayed.
    """
    if not target.batched and len(items) > 1:
        return [pair for item in items for pair in forward_with_states(target, [item])]
    wanted, outputs = logit_rows(items), [item.outputs for item in items]
    with HeadInput(target.module) as head:
        logits = target.run(items, wanted if len(wanted) else np.zeros(1, np.int64)).logits[0].float()
    both = (rows[: len(wanted)].split_with_sizes(outputs) for rows in (logits, head.states))
    return list(zip(*both, strict=True))


@torch.inference_mode()
def states_batch(target: TargetModel, items: Sequence[BatchItem]) -> list[Tensor]:
    """Each item's hidden states [tokens, width] in float32: the output head's input after every token given.

    Writes slots as `TargetModel.forward_batch` does; the head itself runs on a single row only.
    """
    if not target.batched and len(items) > 1:
        return [states for item in items for states in states_batch(target, [item])]
    sizes = [len(item) for item in items]
    with HeadInput(target.module, max_rows=1) as head:
        target.run(items, np.arange(sum(sizes)))
    return list(head.states.split_with_sizes(sizes))


class HeadInput:
    """Captures the output head's input: the hidden states after the last norm, whatever the architecture calls them.

    Inside `with`, `states` [rows, width] in float32 are what the last forward of `module` passed to its head. With
    `max_rows` the head computes only the first `max_rows` rows, for a caller that needs no logits.
    """

    def __init__(self, module: Any, max_rows: int | None = None) -> None:
        self.states = torch.empty(0)
        self._head = module.get_output_embeddings()
        self._max_rows = max_rows

    def __enter__(self) -> HeadInput:
        self._hook = self._head.register_forward_pre_hook(self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()

    def _record(self, head: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.states = inputs[0][0].float()
        return (inputs[0][:, : self._max_rows], *inputs[1:])
