"""Passages beside a draft model: each row has the draft that should gain more, and verification stays exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.backends.vllm.runner_v2 import plugin
from agentspec.backends.vllm.runner_v2.hybrid import stays_exact
from agentspec.backends.vllm.runner_v2.passages import PassageShape
from agentspec.backends.vllm.runner_v2.retrieval import PassageRetriever
from agentspec.cache import SuffixCache
from tests.backends.vllm.runner_v2.conftest import (
    DRAFTED,
    LONGEST,
    REQUESTS,
    VOCABULARY,
    Late,
    RequestStates,
    Runner,
    text,
)

PROMPT, ANSWER, NOVEL = text(1, 20), text(2, 60), text(3, 60)


class DraftModelSpeculator:
    """The part of vLLM's class that ours relies on; its model drafts `right` tokens of known texts, then wrong ones."""

    def __init__(self, right: int, sampled: bool) -> None:
        self.device = torch.device("cpu")
        self.max_num_reqs, self.max_model_len, self.num_speculative_steps = REQUESTS, LONGEST, DRAFTED
        self.draft_logits = torch.zeros((REQUESTS, DRAFTED, VOCABULARY)) if sampled else None
        self.right, self.states = right, RequestStates()
        self.texts: dict[int, list[int]] = {}

    def propose(self, input_batch: Any, *_: Any, dummy_run: bool = False, **__: Any) -> torch.Tensor:
        found = torch.full((input_batch.num_reqs, DRAFTED), VOCABULARY - 1)
        if not dummy_run:
            for row, place in enumerate(input_batch.idx_mapping.tolist()):
                length = int(self.states.total_len.gpu[place])
                known = self.states.all_token_ids.gpu[place, :length].tolist()
                whole = next(text for text in self.texts.values() if text[:length] == known)
                following = whole[length : length + self.right]
                found[row, : len(following)] = torch.tensor(following)
        return found


@pytest.fixture
def join(
    ranks: SimpleNamespace, cache: SuffixCache, late: Late, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Runner]]:
    """Makes a runner whose speculator drafts from a model that is right for so many tokens, and from our cache."""
    joined = []

    def open_retriever(config: Any, shape: PassageShape) -> PassageRetriever:
        return PassageRetriever(lambda state, prompt: cache.request(prompt), VOCABULARY, shape)

    monkeypatch.setattr(plugin, "open_retriever", open_retriever)
    monkeypatch.setattr(plugin, "listen_to_scheduler", lambda: None)
    monkeypatch.setattr(plugin, "close_at_exit", lambda close: None)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1),
        speculative_config=SimpleNamespace(method="eagle3"),
    )

    def make(right: int, sampled: bool = False) -> Runner:
        theirs = DraftModelSpeculator(right, sampled)
        made = plugin.join_model(theirs, config, theirs.states)
        assert made is theirs
        joined.append(getattr(made, plugin.BESIDE))
        return Runner(joined[-1], late)

    yield make
    late.steps = 0
    for speculator in joined:
        speculator.close()


def steps(runner: Runner, answer: list[int], name: str = "a") -> int:
    before = runner.steps
    runner.speculator._model.texts[0] = [*PROMPT, *answer]  # type: ignore[attr-defined]
    runner.begin(name, PROMPT, answer)
    assert runner.run() == {name: answer}
    return runner.steps - before


@pytest.mark.parametrize("late_by", [0, 1])
def test_what_is_known_is_drafted_from_the_cache_and_else_from_the_model(
    join: Callable[..., Runner], late: Late, late_by: int
) -> None:
    late.steps = late_by
    runner = join(right=2)
    alone = len(ANSWER) // 3  # with two right tokens a step
    assert steps(runner, ANSWER) in (alone, alone + 1)
    assert steps(runner, ANSWER) <= len(ANSWER) // (DRAFTED + 1) + 3
    assert steps(runner, NOVEL) <= alone + 3


def test_a_model_that_is_always_right_is_left_to_draft(join: Callable[..., Runner], late: Late) -> None:
    runner = join(right=DRAFTED)
    other = [*ANSWER[:30], *NOVEL[:30]]
    for answer in (ANSWER, other, ANSWER, other):
        assert steps(runner, answer) <= len(answer) // (DRAFTED + 1) + 1


def test_short_matches_that_mislead_leave_the_model_to_draft(join: Callable[..., Runner], late: Late) -> None:
    """A text of few tokens in no order: there is always a match, and what followed it is seldom right."""
    answer = np.random.default_rng(0).integers(0, 8, 150).tolist()
    assert steps(join(right=2), answer) <= 1.2 * len(answer) / 3


def test_drafts_of_ours_have_the_probability_that_they_were_drawn_with(join: Callable[..., Runner], late: Late) -> None:
    """One, of the tokens that are verified; where the model drafts, its own probabilities stay."""
    runner = join(right=0, sampled=True)
    logits = runner.speculator._model.draft_logits  # type: ignore[attr-defined]
    steps(runner, ANSWER)
    runner.speculator._model.texts = {0: [*PROMPT, *ANSWER], 1: [*NOVEL[:20], *NOVEL[20:]]}  # type: ignore[attr-defined]
    runner.begin("known", PROMPT, ANSWER)
    runner.begin("new", NOVEL[:20], NOVEL[20:])
    used = 0
    for _ in range(6):
        logits.fill_(0.5)
        runner.step()
        for name, row in runner.rows.items():
            probabilities, draft = torch.softmax(logits[row], dim=-1), runner.drafts[name]
            certain = torch.nn.functional.one_hot(torch.tensor(draft), VOCABULARY).float()
            if draft[0] == VOCABULARY - 1:  # the model's
                assert torch.equal(logits[row], torch.full_like(logits[row], 0.5))
            else:
                used += 1
                assert torch.equal(probabilities, certain)
    assert used >= 3
    assert torch.equal(logits[3], torch.full_like(logits[3], 0.5))


def test_all_ranks_verify_the_first_ranks_drafts_and_a_dummy_run_is_the_models(
    join: Callable[..., Runner], ranks: SimpleNamespace
) -> None:
    runner = join(right=0)
    batch = SimpleNamespace(req_ids=["_dummy"] * 3, num_reqs=3)
    found = runner.speculator.propose(batch, None, None, None, None, num_sampled=torch.zeros(3), dummy_run=True)
    assert found.tolist() == [[VOCABULARY - 1] * DRAFTED] * 3
    steps(runner, ANSWER)
    ranks.world_size = 2
    runner.begin("a", PROMPT, ANSWER)
    for _ in range(4):
        runner.step()
        sent, source = ranks.sent[-1]
        assert source == 0 and sent in ([runner.drafts["a"]], [[-1] * DRAFTED])


class PartialSpeculator(DraftModelSpeculator):
    """One that writes a few columns of its probabilities only."""

    def draft_logits_spec(self) -> None: ...


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (DraftModelSpeculator(1, True), ""),
        (PartialSpeculator(1, False), ""),
        (PartialSpeculator(1, True), "PartialSpeculator keeps draft probabilities from step to step"),
    ],
)
def test_what_would_not_be_exact_is_left_alone(made: Any, reason: str) -> None:
    assert stays_exact(made) == reason
    made.enable_adaptive_verification = True
    assert "adaptive" in stays_exact(made)
    made.draft_watermarker = object()
    assert "watermark" in stays_exact(made)
