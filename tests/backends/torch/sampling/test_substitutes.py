"""Lossy acceptance in the engine: exact unless asked for, bounded by the rule, kept off forms and other drafters."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.backends.torch.drafters.base import make_draft
from agentspec.backends.torch.drafters.draft_model import DraftModel
from agentspec.backends.torch.engine.speculator import Proposal, Speculator, StepEstimate
from agentspec.backends.torch.engine.stats import Counters
from agentspec.backends.torch.sampling.constraints import ConstraintSpec
from agentspec.protocol.speculation import LossyAcceptanceSpeculation
from agentspec.speculation.governor import Governor
from agentspec.types import LossyAcceptance, SamplingParams, Source
from tests.backends.torch.conftest import laboratory

PROMPT = [72, 101, 108, 108, 111]
HOT = SamplingParams(temperature=1.0, seed=5)
ALL = LossyAcceptance(epsilon=1e-9, delta=1e-9)  # every token with any probability is typical


@pytest.fixture
def other() -> Any:
    """Another random model of the same tokens: most of its drafts are wrong."""
    return laboratory("qwen3").target


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still drafting takes no time, so that nothing is left undrafted on a busy machine."""
    monkeypatch.setattr("agentspec.backends.torch.drafters.draft_model.perf_counter", lambda: 0.0)


def answered(
    lab: Any, model: Any, sampling: SamplingParams, acceptance: LossyAcceptance | None = None, **options: Any
) -> Any:
    small = DraftModel("other", model)
    return lab.run(PROMPT, sampling, draft_model=small, request={"acceptance": acceptance}, **options)


def test_typical_tokens_are_taken_and_counted(lab: Any, other: Any) -> None:
    exact = answered(lab, other, HOT)
    lossy = answered(lab, other, HOT, acceptance=ALL)
    told = lossy.speculation
    assert isinstance(told, LossyAcceptanceSpeculation) and told.lossy
    assert told.substituted > 0 and lossy.tokens != exact.tokens and told.steps < exact.speculation.steps
    assert type(exact.speculation) is not LossyAcceptanceSpeculation


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), HOT])
def test_where_nothing_is_typical_enough_the_answer_is_exact(lab: Any, other: Any, sampling: SamplingParams) -> None:
    never = LossyAcceptance(epsilon=0.9999999, delta=1e9)
    rule = never if sampling.temperature else ALL  # at temperature 0 any bound is exact
    assert answered(lab, other, sampling, acceptance=rule).tokens == answered(lab, other, sampling).tokens


def test_other_drafters_stay_exact(lab: Any) -> None:
    """Scripted drafts of the suffix cache are full of possible tokens, none of which is taken."""

    def wrong(context: list[int], budget: int) -> Any:
        return make_draft([65, 66], [-1, -1], [0.9, 0.8], [3, 3], [Source.SHARED] * 2)

    assert lab.run(PROMPT, HOT, wrong, request={"acceptance": ALL}).tokens == lab.run(PROMPT, HOT).tokens


def test_forbidden_tokens_are_not_taken(lab: Any, other: Any) -> None:
    """All tokens but the even ones are bad words: the draft model's odd tokens would be typical."""
    odd = tuple((token,) for token in range(1, 256, 2))
    found = answered(lab, other, HOT, ALL, constraints=ConstraintSpec(bad_words=odd))
    assert found.tokens and not [token for token in found.tokens if token < 256 and token % 2]


class Listening(Governor):
    """Hears which nodes it is told were accepted."""

    def observe(self, probabilities: Any, sources: Any, accepted: Any, stats: Any) -> None:
        self.heard = list(accepted)


@pytest.mark.parametrize(
    ("path", "substituted", "exact"),
    [([0, 1], [1], [True, False, False]), ([0, 1, 2], [0], [False] * 3), ([0, 1, 2], [], [True] * 3)],
)
def test_the_governor_learns_from_exact_acceptance_only(
    path: list[int], substituted: list[int], exact: list[bool]
) -> None:
    governor, counters = Listening(), Counters()
    draft = Proposal([5, 6, 7], [-1, 0, 1], [0.9] * 3, [Source.MODEL] * 3, [0.9] * 3, asked=True)
    Speculator(None, governor, counters, 10).observe(draft, path, StepEstimate(1.0, 0.1, 1.0), substituted=substituted)
    assert governor.heard == exact and counters.substituted == len(substituted)
