"""A Llama of SGLang that says what scripts say, whatever its logits, with all of its work done; for one text at a time.

Its `config.json` names a file of scripts, of shape (texts, tokens), and the token `mark` with which the first begins,
in the place of its own first token; the next token is the second's mark, and so on. All of that is on the device, so
that it is part of what SGLang records as a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.models.llama import LlamaForCausalLM  # pyright: ignore[reportMissingImports]
from torch import Tensor

SURE = 30_000.0  # above all logits, and within float16


class ForcedLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any, *others: Any, **named: Any) -> None:
        super().__init__(config, *others, **named)
        scripts = torch.from_numpy(np.load(config.scripts)).to(torch.get_default_device())
        self.register_buffer("scripts", scripts, persistent=False)
        self.register_buffer("current", torch.zeros(1, dtype=torch.long), persistent=False)
        self.mark = config.mark

    def forward(self, input_ids: Tensor, positions: Tensor, *others: Any, **named: Any) -> Any:
        found = super().forward(input_ids, positions, *others, **named)
        marked = (input_ids - self.mark).max()
        self.current.copy_(torch.where(marked >= 0, marked, self.current))
        logits = found.next_token_logits
        places = positions if len(positions) == len(logits) else positions.max()[None]
        following = self.scripts[self.current, (places + 1).clamp(max=self.scripts.shape[1] - 1)]
        found.next_token_logits = logits.scatter(1, following.long()[:, None], SURE)
        return found


EntryClass = ForcedLlamaForCausalLM
