"""A Llama of vLLM whose best token at position p is `script[p + 1]`, whatever its logits, with all of its work done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.llama import LlamaForCausalLM  # pyright: ignore[reportMissingImports]

SURE = 30_000.0  # above all logits, and within float16
BASE = 256  # a token stands as three digits, each of which is exact in bfloat16
DIGITS = 3


class ScriptedLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """The script's tokens go through the hidden states, so that they are part of what vLLM records as a CUDA graph."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        weight = next(self.lm_head.parameters())
        rows = vllm_config.model_config.max_model_len + BASE  # drafts may reach beyond the end
        script = torch.zeros(rows, DIGITS, dtype=weight.dtype, device=weight.device)
        self.register_buffer("script", script, persistent=False)

    def set_script(self, tokens: Sequence[int]) -> None:
        """Set the text, prompt and answer, that one request after this follows."""
        self.script.zero_()
        self.script[: len(tokens) - 1].copy_(digits(tokens[1:]))

    def forward(self, input_ids: Any, positions: Tensor, *others: Any, **named: Any) -> Any:
        hidden = super().forward(input_ids, positions, *others, **named)
        hidden[:, :DIGITS].copy_(self.script[positions])
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Any:
        logits = super().compute_logits(hidden_states)
        return logits.scatter(1, tokens_of(hidden_states)[:, None], SURE)


def digits(tokens: Sequence[int]) -> Tensor:
    """The tokens as rows of their digits, the highest first: (tokens, DIGITS)."""
    values = torch.tensor(tokens, dtype=torch.long)
    return torch.stack([values // BASE**place % BASE for place in reversed(range(DIGITS))], 1)


def tokens_of(rows: Tensor) -> Tensor:
    """The tokens whose digits begin the rows. Nothing is copied to the device, which a CUDA graph could not record."""
    found = rows[:, 0].long()
    for place in range(1, DIGITS):
        found = found * BASE + rows[:, place].long()
    return found
