"""Drafts of a small model: its draws are the target's where the models agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.backends.torch.drafters import draft_model
from agentspec.backends.torch.drafters.base import Drafter, chain_draft
from agentspec.backends.torch.drafters.draft_model import LONGEST_WAIT, GatedDrafter, ModelDrafter, SharedNoiseSampler
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.types import Draft, SamplingParams, Source, path_length

SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.4, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.9, min_p=0.1),
    SamplingParams(temperature=0.7, logit_bias={3: 5.0, 10**6: 1.0}, top_p=0.95),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_equal_logits_give_the_targets_own_draw(sampling: SamplingParams) -> None:
    noise = torch.Generator().manual_seed(1)
    for position in range(2, 60):
        logits = 3 * torch.randn(60, generator=noise)
        legal = {token: bias for token, bias in sampling.logit_bias.items() if token < 60}
        known = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        target = Sampler(SamplingParams(**known, logit_bias=legal, seed=9), 60, [0] * position, torch.device("cpu"))
        target.begin(logits[None])
        token, chance = SharedNoiseSampler(sampling, 9).draw(logits, position)
        assert token == target.choose(0) and 0 < chance <= 1


GREEDY = SharedNoiseSampler(SamplingParams(temperature=0), 0)
PROMPT = [72, 101, 108, 108, 111]


def hardly(seconds: float, context: int) -> float:
    """A draft's tokens cost so little that it ends only where the models, which look at `HEAD` tokens, would part."""
    return 0.02


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(temperature=1.0, seed=3)])
def test_it_drafts_the_models_own_continuation(lab: Any, sampling: SamplingParams) -> None:
    drafter = ModelDrafter(lab.target, SharedNoiseSampler(sampling, 3), hardly)
    draft = drafter.propose(PROMPT, 12)
    assert draft is not None and 2 <= len(draft) <= 12 and set(draft.source.tolist()) == {Source.MODEL}
    assert draft.tokens.tolist() == lab.oracle(PROMPT, sampling, max_tokens=len(draft), stop_ids=())
    assert draft.parents.tolist() == list(range(-1, len(draft) - 1)) and (np.diff(draft.probabilities) <= 0).all()


def test_slots_are_rewound_to_the_committed_tokens(lab: Any) -> None:
    """After drafts accepted whole, in part and not at all, the next draft is that of a drafter that starts afresh."""
    drafter, text = ModelDrafter(lab.target, GREEDY, hardly), list(PROMPT)
    for accepted in (0, 1, 3, 100, 2, 0):
        text += [*drafter.propose(text, 8).tokens.tolist()[:accepted], 65]
        fresh = ModelDrafter(lab.target, GREEDY, hardly).propose(text, 8)
        again = drafter.propose(text, 8)
        assert again.tokens.tolist() == fresh.tokens.tolist()
        assert drafter._cache.length == len(drafter._known)


def test_a_token_behind_its_own_table_ends_its_drafts(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of one tokenizer may have tables of different length; on a GPU a missing row would end the process."""
    drafter = ModelDrafter(lab.target, GREEDY, hardly)
    monkeypatch.setattr(lab.target, "vocab_size", 200)
    assert drafter.propose([*PROMPT, 200], 5) is None
    assert drafter.propose([*PROMPT, 200, 65], 5) is None
    assert drafter.propose([*PROMPT, 199], 5) is not None


# The drafter is asked where it pays.


class Scripted(Drafter):
    def __init__(self, script: Callable[[Sequence[int]], Draft | None]) -> None:
        self.script, self.asked = script, 0

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        self.asked += 1
        return self.script(context)


def right(context: Sequence[int]) -> Draft:
    """The text counts up, three tokens at a time."""
    return chain_draft([len(context) + i for i in range(3)], 0.9, Source.MODEL)


def wrong(context: Sequence[int]) -> Draft:
    return chain_draft([10**6] * 3, 0.9, Source.MODEL)


def play(drafter: GatedDrafter, rounds: int) -> None:
    """Commit what a target that counts up would. By its clock each drafting takes 10 µs, on a busy machine too."""
    context, readings = list(range(5)), itertools.count()
    for _ in range(rounds):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draft_model, "perf_counter", lambda: 1e-5 * next(readings))
            draft = drafter.propose(context, 8)
        after = list(range(len(context), len(context) + 8))
        accepted = 0 if draft is None else path_length(draft.tokens.tolist(), draft.parents.tolist(), after)
        context += after[: 1 + accepted]


def test_a_model_that_pays_is_asked_every_round_and_weighs_its_own_time() -> None:
    costly = Scripted(right)
    drafter = GatedDrafter(Scripted(lambda context: None), costly, lambda rows: 1.0)
    play(drafter, 50)
    assert costly.asked == 50 and drafter.seconds_weighed > 0


@pytest.mark.parametrize(("script", "step_seconds"), [(wrong, 1e-9), (right, 1e-9), (wrong, 1e-5)])
def test_a_model_that_does_not_pay_is_asked_ever_less(
    script: Callable[[Sequence[int]], Draft], step_seconds: float
) -> None:
    costly = Scripted(script)
    play(GatedDrafter(Scripted(lambda context: None), costly, lambda rows: step_seconds), 4 * LONGEST_WAIT)
    assert costly.asked < 40
    before = costly.asked
    assert before >= 6, "it is tried again"
