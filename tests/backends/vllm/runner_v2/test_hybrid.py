"""Passages beside a draft model: each row has the draft that should gain more, and verification stays exact."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.backends.vllm.runner_v2 import plugin, retrieval
from agentspec.backends.vllm.runner_v2.passages import PassageShape
from agentspec.backends.vllm.runner_v2.retrieval import PassageRetriever
from agentspec.backends.vllm.runner_v2.verification import strict_rejection
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
        self.right, self.states, self.forwards = right, RequestStates(), 0
        self.texts: dict[int, list[int]] = {}
        self.draft_token_confidence_probs = torch.zeros((REQUESTS, DRAFTED))
        self.observed: list[list[int]] = []

    def observe_verification(self, *counts: torch.Tensor) -> None:
        self.observed = [count.tolist() for count in counts]

    def propose(
        self, input_batch: Any, *_: Any, dummy_run: bool = False, num_speculative_tokens: int = DRAFTED, **__: Any
    ) -> torch.Tensor:
        self.forwards += num_speculative_tokens
        found = torch.full((input_batch.num_reqs, DRAFTED), VOCABULARY - 1)
        self.draft_token_confidence_probs[: input_batch.num_reqs] = 0.25
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

    def open_retriever(config: Any, shape: PassageShape, place: str) -> PassageRetriever:
        return PassageRetriever(lambda state, prompt: cache.request(prompt), VOCABULARY, shape)

    monkeypatch.setattr(retrieval, "open_retriever", open_retriever)
    monkeypatch.setattr(plugin, "listen_to_scheduler", lambda: None)
    for name, members in {"spec_decode.rejection_sampler": {"rejection_sample": None}, "sample.gumbel": {}}.items():
        monkeypatch.setitem(sys.modules, module := f"vllm.v1.worker.gpu.{name}", ModuleType(module))
        vars(sys.modules[module]).update({"gumbel_sample": None, **members})
    monkeypatch.setattr(plugin, "verify_strictly", lambda config, logits: logits is None)
    parallel = SimpleNamespace(prefill_context_parallel_size=1, tensor_parallel_size=1, data_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel, speculative_config=SimpleNamespace(method="eagle3"))

    def make(right: int, sampled: bool = False) -> Runner:
        theirs = DraftModelSpeculator(right, sampled)
        made = plugin.join_model(theirs, config, theirs.states)
        assert made is theirs
        joined.append(getattr(made, plugin.BESIDE))
        return Runner(joined[-1], late)

    yield make
    late.steps = 0
    for one in joined:
        one.close()


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
    for answer, lost in ((ANSWER, 0), (other, 0), (ANSWER, 0), (other, 1)):  # a passage may part with it where both do
        assert steps(runner, answer) <= len(answer) // (DRAFTED + 1) + 1 + lost


def test_short_matches_that_mislead_leave_the_model_to_draft(join: Callable[..., Runner], late: Late) -> None:
    """A text of few tokens in no order: there is always a match, and what followed it is seldom right."""
    answer = np.random.default_rng(0).integers(0, 8, 150).tolist()
    assert steps(join(right=2), answer) <= 1.2 * len(answer) / 3


def test_drafts_of_ours_are_verified_by_the_targets_draw_and_the_models_by_their_probabilities(
    join: Callable[..., Runner], late: Late, caplog: pytest.LogCaptureFixture
) -> None:
    runner = join(right=0, sampled=True)
    logits = runner.speculator._model.draft_logits  # type: ignore[attr-defined]
    certain, perhaps = strict_rejection().ours[logits.data_ptr()]
    steps(runner, ANSWER)
    runner.speculator._model.texts = {0: [*PROMPT, *ANSWER], 1: NOVEL}  # type: ignore[attr-defined]
    runner.begin("known", PROMPT, ANSWER)
    runner.begin("seeded", PROMPT, ANSWER, seed=1)  # the model's drafts decide its text, so that it has no others
    runner.begin("new", NOVEL[:20], NOVEL[20:])
    used = 0
    for _ in range(6):
        runner.step()
        drawn = {name: runner.drafts[name][0] == VOCABULARY - 1 for name in runner.rows}
        assert {name: not certain[row] for name, row in runner.rows.items()} == drawn
        assert set(certain.nonzero().flatten().tolist()) <= perhaps != {runner.rows["seeded"]}
        assert drawn["seeded"]  # a short match may draft for the new one, since the model is never right
        used += not drawn["known"]
    assert used >= 3 and not logits.any() and not caplog.text, "batches of one request and of three"


def test_the_model_drafts_one_token_where_all_requests_follow_passages(
    join: Callable[..., Runner], late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    late.steps, runner = 1, join(right=1)
    model: Any = runner.speculator._model  # type: ignore[attr-defined]
    first, answer = steps(runner, ANSWER), [*ANSWER[:40], *NOVEL[:20]]
    assert model.forwards == DRAFTED * first
    model.forwards, rest = 0, steps(runner, answer)
    assert model.forwards <= DRAFTED * rest - 4 * (DRAFTED - 1), (
        "of some 8 steps in the passage, the host sees one late"
    )
    model.texts[0], model.forwards = [*PROMPT, *ANSWER], 0
    runner.begin("a", PROMPT, ANSWER)
    for _ in range(5):
        runner.step()
    with monkeypatch.context() as failing:
        failing.setattr(runner.speculator, "_match", lambda *_: 1 / 0)
        runner.step()
        assert runner.drafts["a"] == [0] * DRAFTED, "what the model did not draft is verified as certain"
    runner.run()


def test_adaptive_verification_gets_our_confidence_in_our_rows(join: Callable[..., Runner], late: Late) -> None:
    """The model's own is learned from the verification of its drafts."""
    runner = join(right=0)
    model: Any = runner.speculator._model  # type: ignore[attr-defined]
    model.enable_adaptive_verification = True
    for _ in range(3):
        steps(runner, ANSWER)
    model.texts = {0: [*PROMPT, *ANSWER], 1: NOVEL}
    runner.begin("known", PROMPT, ANSWER)
    runner.begin("new", NOVEL[:20], NOVEL[20:])
    for _ in range(4):
        runner.step()
    ours, theirs = model.draft_token_confidence_probs[:2].tolist()
    assert min(ours) > 0.7 and theirs == [0.25] * DRAFTED
    model.observe_verification(torch.tensor([*runner.rows.values()]), torch.tensor([3, 2]), torch.tensor([2, 3]))
    assert model.observed[1:] == [[1, 2], [0, 3]]


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


def test_a_model_whose_drafts_are_watermarked_drafts_alone() -> None:
    made: Any = DraftModelSpeculator(1, True)
    made.draft_watermarker = object()
    config = SimpleNamespace(parallel_config=SimpleNamespace(prefill_context_parallel_size=1))
    assert plugin.join_model(made, config, made.states) is made and not hasattr(made, plugin.BESIDE)
