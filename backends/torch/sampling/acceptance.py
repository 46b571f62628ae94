"""Lossy rules, by which drafted tokens are accepted in place of the model's own draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.errors import ConfigurationError
from agentspec.protocol.speculation import LossyAcceptanceSpeculation
from agentspec.types import LossyAcceptance, Source, Speculation


@dataclass(frozen=True, slots=True)
class JudgeHead:
    """A trained judge of drafted tokens: one linear layer over the target's hidden state (Judge Decoding, Bachmann et
    al. 2025, arXiv 2501.19309, section 4). `weight` [width] and `bias` [] are in float32, for the model that
    `fingerprint` identifies.
    """

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


def typical_bound(probabilities: Tensor, epsilon: float, delta: float) -> float:
    """The least probability of a typical token: min(epsilon, delta * exp(-entropy)), of a distribution [vocab]
    (Medusa, Cai et al. 2024, section 2.3.2).
    """
    entropy = -float(torch.special.xlogy(probabilities, probabilities).sum())
    return min(epsilon, delta * math.exp(-entropy))


class Substitutes:
    """One answer's lossy rule: accepts tokens of the draft model in place of the target's own draws, and counts them.

    The rule "typical" accepts what is typical of the target's processed distribution; "judge" accepts what `head` finds
    right. Tokens that the request forbids are never accepted. Nor does a judge accept `ends`: it was trained on texts,
    not on where they end. `taken` are the nodes of the running step.
    """

    def __init__(
        self, rule: LossyAcceptance, sampler: Sampler, head: JudgeHead | None = None, ends: Set[int] = frozenset()
    ) -> None:
        self.taken: list[int] = []
        self._rule, self._sampler, self._head, self._ends = rule, sampler, head, ends
        self._count = 0
        self._tokens: Sequence[int] = ()
        self._sources: Sequence[int] = ()
        self._scores: Sequence[float] = ()  # of each node, by the judge

    @classmethod
    def of(
        cls, rule: LossyAcceptance, sampler: Sampler, heads: Mapping[str, JudgeHead], ends: Set[int]
    ) -> Substitutes | None:
        """None for an exact answer: so is every answer that has to have a form, since forms promise each token.

        `ends` are the tokens that end the answer.
        """
        if sampler.constraints is not None and sampler.constraints.grammar is not None:
            return None
        if rule.rule == "typical":
            return None if sampler.greedy else cls(rule, sampler)  # greedy has no other typical token
        return cls(rule, sampler, heads[rule.judge_head or ""], ends)

    @property
    def needs_states(self) -> bool:
        return self._head is not None

    def begin(self, tokens: Sequence[int], sources: Sequence[int], states: Tensor | None) -> None:
        """Take a step's draft. A judge needs `states` [1 + nodes, width]: those behind the context and each node."""
        self.taken, self._tokens, self._sources, self._scores = [], tokens, sources, ()
        if self._head is not None and states is not None and len(tokens):
            self._scores = self._head.scores(states[1:]).tolist()

    def choose(self, row: int, nodes: Sequence[int]) -> int | None:
        """One of the draft's `nodes`, all of which follow `row`, to go on with; None for the target's own draw."""
        ours = [node for node in nodes if self._sources[node] == Source.MODEL and self._may_take(self._tokens[node])]
        if not ours:
            return None
        node = self._typical(row, ours) if self._head is None else self._judged(ours)
        if node is not None:
            self.taken.append(node)
            self._count += 1
        return node

    def _may_take(self, token: int) -> bool:
        return token not in self._ends and self._sampler.may_draw(token)

    def _typical(self, row: int, nodes: Sequence[int]) -> int | None:
        probabilities = self._sampler.probabilities(row)
        best = max(nodes, key=lambda node: float(probabilities[self._tokens[node]]))
        bound = typical_bound(probabilities, self._rule.epsilon, self._rule.delta)
        return best if float(probabilities[self._tokens[best]]) > bound else None

    def _judged(self, nodes: Sequence[int]) -> int | None:
        best = max(nodes, key=lambda node: self._scores[node])
        return best if self._scores[best] > self._rule.threshold else None

    def labelled(self, done: Speculation) -> LossyAcceptanceSpeculation:
        """What is reported of the answer."""
        return LossyAcceptanceSpeculation(
            done.drafted,
            done.accepted,
            done.steps,
            done.estimated_seconds_saved,
            knobs=self._rule.knobs,
            substituted=self._count,
        )
