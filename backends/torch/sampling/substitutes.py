"""One answer's lossy acceptance: its policy for each step, and what it accepted in place of the model's own draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from torch import Tensor

from agentspec.backends.torch.sampling.acceptance import AcceptancePolicy
from agentspec.backends.torch.sampling.judge_head import JudgedAcceptance, JudgeHead
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.backends.torch.sampling.typical import TypicalAcceptance
from agentspec.types import LossyAcceptance, LossyAcceptanceSpeculation, Source, Speculation


class Substitutes:
    """The `AcceptancePolicy` of one answer: applies the rule to tokens of the draft model alone, and counts.

    Tokens that the request forbids are never accepted. Nor does a judge accept `ends`: it was trained on texts, not on
    where they end. `taken` are the nodes of the running step.
    """

    def __init__(
        self, rule: LossyAcceptance, sampler: Sampler, head: JudgeHead | None = None, ends: Set[int] = frozenset()
    ) -> None:
        self.taken: list[int] = []
        self._rule, self._sampler, self._head, self._ends = rule, sampler, head, ends
        self._count = 0
        self._tokens: Sequence[int] = ()
        self._sources: Sequence[int] = ()
        self._policy: AcceptancePolicy | None = None

    @classmethod
    def of(
        cls, rule: LossyAcceptance | None, sampler: Sampler, heads: Mapping[str, JudgeHead], ends: Set[int]
    ) -> Substitutes | None:
        """None for an exact answer: so is every answer that has to have a form, since forms promise each token.

        `ends` are the tokens that end the answer.
        """
        if rule is None or sampler.constraints.grammar is not None:
            return None
        if rule.rule == "typical":
            return None if sampler.greedy else cls(rule, sampler)  # greedy has no other typical token
        return cls(rule, sampler, heads[rule.judge_head or ""], ends)

    @property
    def needs_states(self) -> bool:
        return self._head is not None

    def begin(self, tokens: Sequence[int], sources: Sequence[int], states: Tensor | None) -> None:
        """Take a step's draft, and the hidden states behind it where the rule judges by them."""
        self.taken, self._tokens, self._sources, self._policy = [], tokens, sources, None
        if self._head is None:
            rule, probabilities = self._rule, self._sampler.probabilities
            self._policy = TypicalAcceptance(tokens, probabilities, epsilon=rule.epsilon, delta=rule.delta)
        elif states is not None and len(tokens):
            self._policy = JudgedAcceptance(self._head, states, threshold=self._rule.threshold)

    def choose(self, row: int, nodes: Sequence[int]) -> int | None:
        ours = [node for node in nodes if self._sources[node] == Source.MODEL and self._may_take(self._tokens[node])]
        node = self._policy.choose(row, ours) if ours and self._policy is not None else None
        if node is not None:
            self.taken.append(node)
            self._count += 1
        return node

    def _may_take(self, token: int) -> bool:
        return token not in self._ends and self._sampler.constraints.allow(token)

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
