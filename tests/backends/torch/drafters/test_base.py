"""Chains as drafts, and the forwards that drafters share."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

from agentspec.backends.torch.drafters.base import DraftForward, chain_draft, draft_alone, draft_together, timed
from agentspec.backends.torch.drafters.cheap import DrafterFactory
from agentspec.backends.torch.drafters.draft_model import CHUNK, DraftModel, ModelDrafter, SharedNoiseSampler
from agentspec.backends.torch.engine.sequence import EngineContext
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.target import TargetModel
from agentspec.types import SamplingParams, Source


def test_a_chain_may_have_a_confidence_for_every_token() -> None:
    draft = chain_draft([5, 6, 7], [0.5, 1.0, 0.2], Source.NGRAM)
    assert draft.probabilities.tolist() == pytest.approx([0.5, 0.5, 0.1])
    assert len(chain_draft([], 0.5, Source.NGRAM)) == 0


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


def test_one_reads_its_prompt_beside_others_that_draft(lab: Any, forwards: list[int]) -> None:
    first, second = drafters(lab)[:2]
    long = draft_together([first.drafting([7] * (CHUNK + 100), 4), second.drafting(PROMPTS[1], 4)])
    assert long[0] is None and long[1] is not None and forwards[0] == 2
    assert first._cache.length == CHUNK


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


def test_an_error_of_the_device_is_everybodys(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(target: TargetModel, items: Any) -> Any:
        raise torch.AcceleratorError("assert")

    monkeypatch.setattr(TargetModel, "forward_batch", failing)
    with pytest.raises(torch.AcceleratorError):
        draft_alone(drafters(lab)[0].drafting(PROMPTS[0], 4))


def test_an_answer_is_charged_its_share_of_the_time(lab: Any) -> None:
    def asks() -> Generator[DraftForward, Any, float]:
        reply = yield DraftForward(lab.target, BatchItem(lab.target.new_cache(1), [1]))
        return reply.seconds

    results = draft_together([timed(asks()) for _ in range(4)])
    shares = [result[0] for result in results]
    assert len(set(shares)) == 1 and all(result[1] >= result[0] > 0 for result in results)


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


def test_a_token_takes_a_share_of_a_step_that_several_answers_have(lab: Any) -> None:
    """While a draft model drafts for one answer, all of them wait."""
    context = EngineContext(lab.target, lab.tokenizer)
    context.governor.cost.calibrate([(tokens, 0, 1.0 + 0.01 * (tokens - 1)) for tokens in (1, 2, 4, 8, 16)])
    shares = []
    for context.drawing in (0, 1, 4):
        shares.append(context.token_seconds(100))
    assert shares == pytest.approx([1.0, 1.0, 1.03 / 4])


def test_a_step_tells_how_many_answers_it_draws_for(lab: Any, ask_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(EngineContext, "token_seconds", lambda self, context: seen.append(self.drawing) or 1.0)
    sampling = SamplingParams(temperature=0)
    asks = [
        ask_of(prompt, sampling, max_tokens=4 * n + 4, stop_ids=(), speculates=True) for n, prompt in enumerate(PROMPTS)
    ]
    lab.run_batch(asks, drafters=with_model(lab))
    assert max(seen) == len(PROMPTS) and min(seen) >= 1
