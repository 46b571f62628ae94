"""Chains as drafts, and the forwards that drafters share."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.backends.torch.drafters.base import draft_together
from agentspec.backends.torch.drafters.cheap import DrafterFactory
from agentspec.backends.torch.drafters.draft_model import DraftModel, ModelDrafter, SharedNoiseSampler
from agentspec.backends.torch.model.target import TargetModel
from agentspec.types import SamplingParams

PROMPTS = [[*[72, 101, 108, 108, 111][: 2 + n % 4], n] for n in range(6)]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of items of every forward."""
    seen: list[int] = []
    original = TargetModel.forward_batch

    def counted(target: TargetModel, items: Any) -> Any:
        seen.append(len(items))
        return original(target, items)

    monkeypatch.setattr(TargetModel, "forward_batch", counted)
    return seen


def drafters(lab: Any) -> list[ModelDrafter]:
    samplings = [SamplingParams(temperature=n % 2, seed=n) for n in range(len(PROMPTS))]
    return [ModelDrafter(lab.target, SharedNoiseSampler(each, each.seed or 0), lambda *cost: 0.0) for each in samplings]


def test_drafts_are_the_same_together_and_share_every_forward(lab: Any, forwards: list[int]) -> None:
    alone = [drafter.propose(prompt, 9) for drafter, prompt in zip(drafters(lab), PROMPTS, strict=True)]
    rounds = [len(set(draft.parents.tolist())) for draft in alone]
    assert len(forwards) == sum(rounds)
    forwards.clear()
    both = zip(drafters(lab), PROMPTS, strict=True)
    together = draft_together([drafter.drafting(prompt, 9) for drafter, prompt in both])
    assert len(forwards) == max(rounds) and forwards[0] == len(PROMPTS)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.parents.tolist() == other.parents.tolist()


def test_an_error_in_a_shared_forward_is_that_answers_alone(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = TargetModel.forward_batch
    wants = [drafter.propose(prompt, 9) for drafter, prompt in zip(drafters(lab), PROMPTS, strict=True)]
    subjects = drafters(lab)

    def failing(target: TargetModel, items: Any) -> Any:
        if any(item.kv_cache is subjects[2]._cache for item in items):
            raise MemoryError("no room")
        return original(target, items)

    monkeypatch.setattr(TargetModel, "forward_batch", failing)
    both = zip(subjects, PROMPTS, strict=True)
    got = draft_together([drafter.drafting(prompt, 9) for drafter, prompt in both])
    assert isinstance(got[2], MemoryError)
    for number in (0, 1, 3, 4, 5):
        assert got[number].tokens.tolist() == wants[number].tokens.tolist()


def with_model(lab: Any) -> DrafterFactory:
    return DrafterFactory(("model",), DraftModel("small", lab.target))


def test_answers_with_a_draft_model_are_the_oracles_in_fewer_forwards(
    lab: Any, ask_of: Any, forwards: list[int]
) -> None:
    """Six answers side by side need hardly more forwards of the draft model than one."""
    asks = [
        ask_of(prompt, SamplingParams(temperature=n % 2, seed=n), max_tokens=16, stop_ids=(), speculates=True)
        for n, prompt in enumerate(PROMPTS)
    ]
    counts = []
    for chosen in (asks[:1], asks):
        forwards.clear()
        outcomes = lab.run_batch(chosen, drafters=with_model(lab))
        counts.append(len(forwards))
        for ask, outcome in zip(chosen, outcomes, strict=True):
            assert outcome.tokens == lab.oracle(ask.prompt, ask.sampling, max_tokens=16, stop_ids=())
    assert counts[1] < 3 * counts[0]
