"""A trained judge of drafted tokens: one linear layer over the target's hidden state (Judge Decoding, Bachmann et al.
2025, arXiv 2501.19309, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentspec.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class JudgeHead:
    """`weight` [width] and `bias` [] in float32, for the hidden states of the model that `fingerprint` identifies."""

    weight: Tensor
    bias: Tensor
    fingerprint: str

    def scores(self, states: Tensor) -> Tensor:
        """The probability that each token is right, from the hidden states [tokens, width] behind them; [tokens]."""
        return torch.sigmoid(states @ self.weight.to(states.device) + self.bias.to(states.device))

    def save(self, path: Path) -> None:
        tensors = {"weight": self.weight.cpu().contiguous(), "bias": self.bias.cpu().contiguous()}
        save_file(tensors, path, metadata={"fingerprint": self.fingerprint})

    @classmethod
    def load(cls, path: Path, *, fingerprint: str, width: int | None) -> JudgeHead:
        """Read a head. Raises `ConfigurationError` if there is none in `path`, or it was trained on another model; None
        stands for a `width` that is not known.
        """
        try:
            with safe_open(path, "pt") as file:
                weight, bias = (file.get_tensor(name).float() for name in ("weight", "bias"))
                trained = (file.metadata() or {}).get("fingerprint", "")
        except (OSError, SafetensorError) as error:
            raise ConfigurationError(f"judge_head {path} cannot be read: {error}") from error
        if weight.ndim != 1 or width not in (None, len(weight)) or bias.shape != () or trained != fingerprint:
            raise ConfigurationError(
                f"judge_head {path} was trained on another model: train one for this backend"
                " (python -m agentspec.benchmarks.judge_training --backend NAME)"
            )
        return cls(weight, bias, trained)


class JudgedAcceptance:
    """Accepts the drafted token that the head finds right with the highest probability, if that is above `threshold`.

    `states` [1 + nodes, width] are the hidden states behind the context and behind each node of the draft.
    """

    def __init__(self, head: JudgeHead, states: Tensor, *, threshold: float) -> None:
        self._scores = head.scores(states[1:]).tolist()
        self._threshold = threshold

    def choose(self, row: int, nodes: Sequence[int]) -> int | None:
        best = max(nodes, key=lambda node: self._scores[node])
        return best if self._scores[best] > self._threshold else None
