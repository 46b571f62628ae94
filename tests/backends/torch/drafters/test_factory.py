"""Every drafter through the engine's own loop: the oracle's answers, and over many seeds the target's distribution."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.backends.torch.drafters.draft_model import DraftModel
from agentspec.speculation.cost import CostModel
from agentspec.types import SamplingParams
from tests.backends.torch.conftest import Ask, EagerGovernor, Lab, tiny, tree_of

PROMPT = [72, 101, 108, 108, 111, 32, 72, 101, 108, 108, 111, 32, 72, 101]
SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.2, seed=6),
    SamplingParams(temperature=1.5, top_k=20, seed=7),
)


def near(module: Any, noise: float) -> Any:
    """A model that mostly agrees with `module`."""
    torch.manual_seed(1)
    other = copy.deepcopy(module)
    for weight in other.parameters():
        weight.data += noise * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0.0
    return other


class SlowTarget(CostModel):
    """A target beside which any small model is fast, whatever is measured."""

    def observe(self, tokens: int, context: int, seconds: float, batch: int = 1) -> None:
        pass

    def seconds(self, tokens: int, context: int = 0, batch: int = 1) -> float:
        return 1.0


@pytest.fixture
def slow() -> Any:
    return EagerGovernor(cost=SlowTarget())


def broken(logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, float("nan"))


@pytest.fixture(scope="module")
def small_models(lab: Any) -> dict[str, DraftModel]:
    close = Lab(near(lab.reference, 0.05)).target
    return {
        "close": DraftModel("close", close),
        "itself": DraftModel("itself", Lab(copy.deepcopy(lab.reference)).target),
        "another family": DraftModel("gemma", Lab(tiny("gemma3")).target),
    }


SLOW = pytest.mark.slow
OTHERS = ("cache", "prediction", "another family")


@pytest.fixture(params=["close", *OTHERS])
def drafting(request: pytest.FixtureRequest, small_models: dict[str, DraftModel]) -> tuple[str, DraftModel | None]:
    """What drafts: the cache, also a prediction, and also a draft model."""
    return request.param, small_models.get(request.param)


def test_every_drafter_gives_the_oracles_answer(lab: Any, drafting: Any, slow: Any) -> None:
    name, model = drafting
    wants = [lab.oracle(PROMPT, sampling, max_tokens=24, stop_ids=()) for sampling in SAMPLINGS]
    asks = [
        Ask(
            PROMPT, sampling, partly_knowing([*PROMPT, *want]) if model is None else (lambda *_: None),
            max_tokens=24, stop_ids=(), prediction=None if name == "cache" else [*want[:9], 1, *want[9:]],
        )
        for sampling, want in zip(SAMPLINGS, wants, strict=True)
    ]  # fmt: skip
    outcomes = lab.run_batch(asks, draft_model=model, governor=slow)
    for sampling, got, want in zip(SAMPLINGS, outcomes, wants, strict=True):
        lab.require_same(PROMPT, sampling, got.tokens, want)
        assert not lab.divergences and got.speculation.drafted > 0


def partly_knowing(whole: list[int]) -> Any:
    """A cache that drafts the right token and a guess behind it."""

    def cache(text: list[int], budget: int) -> Any:
        rest = [whole[len(text)], 65] if len(text) < len(whole) else [65, 66]
        return tree_of(rest, [-1, 0])

    return cache


@pytest.mark.parametrize("drafting", ["close", *(pytest.param(name, marks=SLOW) for name in OTHERS)], indirect=True)
@pytest.mark.parametrize("seeds", [60, pytest.param(400, marks=pytest.mark.long)])
def test_over_many_seeds_answers_have_the_targets_distribution(lab: Any, drafting: Any, seeds: int, slow: Any) -> None:
    """Two tokens, four candidates each: the joint frequencies are the probabilities, by Pearson's test at 1e-4."""
    plain = SamplingParams(temperature=1.0, top_k=4, seed=0)
    options: dict[str, Any] = {"max_tokens": 4, "stop_ids": (), "prediction": [1, 2]}
    asks = [Ask(PROMPT, replace(plain, seed=seed), **options) for seed in range(seeds)]
    outcomes = lab.run_batch(asks, draft_model=drafting[1], governor=slow)
    counted = Counter(tuple(got.tokens[:2]) for got in outcomes)
    expected = {
        (a, b): seeds * p * q
        for a, p in top(lab.logits(PROMPT), plain.top_k)
        for b, q in top(lab.logits([*PROMPT, a]), plain.top_k)
    }
    assert set(counted) <= set(expected)
    rare = [key for key, value in expected.items() if value < 5]
    cells = [(counted[key], value) for key, value in expected.items() if value >= 5]
    cells += [(sum(counted[key] for key in rare), sum(expected[key] for key in rare))] if rare else []
    statistic = sum((seen - value) ** 2 / max(value, 1e-9) for seen, value in cells)
    assert statistic < chi_square_bound(len(cells) - 1)


def top(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    best = np.argsort(-logits)[:count]
    weights = np.exp(logits[best] - logits[best].max())
    return [(int(token), float(p)) for token, p in zip(best, weights / weights.sum(), strict=True)]


def chi_square_bound(freedom: int) -> float:
    """The 1 - 1e-4 quantile, by Wilson and Hilferty's approximation."""
    freedom = max(freedom, 1)
    return float(freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3)


def test_a_close_model_saves_steps_and_itself_more(lab: Any, small_models: dict[str, DraftModel], slow: Any) -> None:
    """Coupled draws: at temperature 1 too, the target accepts what an equal model drew."""
    sampling, steps = SamplingParams(temperature=1.0, seed=11), {}
    for name in ("close", "itself"):
        model = small_models[name]
        outcome = lab.run(PROMPT, sampling, max_tokens=40, stop_ids=(), draft_model=model, governor=slow)
        steps[name] = outcome.speculation.steps
    assert steps["itself"] <= steps["close"] < 40
    assert steps["itself"] < 25


def test_a_draft_model_that_computes_nonsense_changes_nothing(
    lab: Any, small_models: dict[str, DraftModel], monkeypatch: pytest.MonkeyPatch, slow: Any
) -> None:
    model, sampling = small_models["close"].model, SAMPLINGS[1]
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args: broken(forward(*args)))
    got = lab.run(PROMPT, sampling, max_tokens=20, stop_ids=(), draft_model=small_models["close"], governor=slow)
    lab.require_same(PROMPT, sampling, got.tokens, lab.oracle(PROMPT, sampling, max_tokens=20, stop_ids=()))
