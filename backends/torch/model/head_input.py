"""What a model's output head reads: the hidden states after the last norm, whatever the architecture calls them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HeadInput:
    """Inside `with`, `states` are the rows [rows, width] in float32 that the last forward of `module` gave its head.

    With `most_rows` the head computes only the first so many of them, for a caller who wants no logits.
    """

    def __init__(self, module: Any, most_rows: int | None = None) -> None:
        self.states = torch.empty(0)
        self._head = module.get_output_embeddings()
        self._most_rows = most_rows

    def __enter__(self) -> HeadInput:
        self._hook = self._head.register_forward_pre_hook(self._seen)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()

    def _seen(self, head: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.states = inputs[0][0].float()
        return (inputs[0][:, : self._most_rows], *inputs[1:])
