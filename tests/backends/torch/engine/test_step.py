"""A step as a whole: what is drawn ahead of the commits, in how many transfers, and whose fault a failure is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.backends.torch.engine import engine as step
from agentspec.backends.torch.engine.scheduler import plan_step
from agentspec.backends.torch.grammars.grammar import GrammarCompiler
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.constraints import ConstraintSpec
from agentspec.types import SamplingParams
from tests.backends.torch.conftest import Ask, EagerGovernor, tree_of

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 257, 40, 41, 258]
SAMPLED = SamplingParams(temperature=0.9, seed=4)
NUCLEUS = replace(SAMPLED, top_p=0.9)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SAMPLED,
    "nucleus": NUCLEUS,
    "top k, min p": replace(SAMPLED, top_k=9, top_p=0.8, min_p=0.02),
    "penalised": replace(NUCLEUS, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3),
    "greedy, penalised": SamplingParams(temperature=0, frequency_penalty=0.5, logit_bias={70: 2.0}),
    "stop strings": replace(SAMPLED, stop=("e", "\n", "a")),
    "shortest length": replace(NUCLEUS, min_tokens=7, logit_bias={256: 6.0}),
    "shortest length, no truncation": replace(SAMPLED, min_tokens=7, logit_bias={256: 6.0}),
    "log-probabilities": replace(SAMPLED, logprobs=True, top_logprobs=4),
    "greedy, log-probabilities": SamplingParams(temperature=0, logprobs=True),
    "form": replace(SAMPLED, max_tokens=30),
    "form, nucleus": replace(NUCLEUS, seed=9),
    "greedy form": SamplingParams(temperature=0),
}


@pytest.fixture(scope="module")
def form(byte_tokens: Any) -> ConstraintSpec:
    source = 'start: "{" /[a-p]{3,9}/ ":" /[0-9]{2,5}/ "}"'
    return ConstraintSpec(GrammarCompiler(byte_tokens, 259, [256]).compile(source, param="p"), bad_words=((97, 97),))


def asks_of(lab: Any, form: ConstraintSpec) -> list[Any]:
    """Each kind of request as two choices, with drafts that are right now and then; some read their prompts longer."""
    plain = []
    for number, (name, sampling) in enumerate(SAMPLINGS.items()):
        prompt = PROMPT[: 4 + number] * (1 + number % 3)
        for choice in range(2):
            rules = replace(form if "form" in name else ConstraintSpec(), choice=choice)
            plain.append(Ask(prompt, sampling, constraints=rules, max_tokens=18))
    return [
        replace(ask, script=winding([*ask.prompt, *outcome.tokens], number // 2))
        for number, (ask, outcome) in enumerate(zip(plain, lab.run_batch(plain), strict=True))
    ]


def winding(whole: Sequence[int], seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return lambda text, budget: tree_of.winding(whole[len(text) :], rng, int(rng.integers(0, 12)))


@pytest.mark.parametrize(
    "together", [5, pytest.param(1, marks=pytest.mark.slow), pytest.param(28, marks=pytest.mark.slow)]
)
def test_answers_are_the_same_drawn_ahead(
    lab: Any, form: ConstraintSpec, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wants = lab.run_batch(asks_of(lab, form))
    asks = asks_of(lab, form)
    monkeypatch.setattr(lab, "draws_ahead", True)
    for start in range(0, len(asks), together):
        for got, want in zip(lab.run_batch(asks[start : start + together]), wants[start:], strict=False):
            assert (got.tokens, got.text, got.finish) == (want.tokens, want.text, want.finish)
            assert [(one.token_id, one.text) for one in got.logprobs] == [
                (one.token_id, one.text) for one in want.logprobs
            ]
            for one, other in zip(got.logprobs, want.logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [best.token_id for best in one.top] == [best.token_id for best in other.top]


def test_a_step_waits_once_for_its_draws_and_once_for_an_answers_log_probabilities(
    lab: Any, waits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplings = [sampling for name, sampling in SAMPLINGS.items() if "form" not in name and not sampling.min_tokens]
    asks = [Ask(PROMPT, each, winding(PROMPT * 4, 3), max_tokens=12, stop_ids=()) for each in samplings]
    shared = step.EngineContext(lab.target, lab.tokenizer, governor=EagerGovernor(), draws_ahead=True)
    sequences = [ask.begin(shared, None) for ask in asks]
    scored, forward, seen = sum(each.logprobs for each in samplings), TargetModel.forward_batch, Counter[str]()

    def computed(target: TargetModel, items: Any) -> Any:
        logits = forward(target, items)
        seen.clear()
        return logits

    monkeypatch.setattr(TargetModel, "forward_batch", computed)
    with torch.inference_mode(), waits(seen):
        for _ in range(3):
            step.run_step(plan_step(sequences, shared), shared)
            assert seen == {"tolist": 1, "cpu": scored}
            assert not any(sequence.finish for sequence in sequences), "ended too early to be counted"
