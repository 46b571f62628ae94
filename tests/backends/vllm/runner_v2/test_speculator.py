"""Drafting one or two steps late, on a runner in miniature; with vLLM's own classes: test_contract.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentspec.cache import SuffixCache
from agentspec.types import Namespace
from tests.backends.conftest import stored
from tests.backends.vllm.runner_v2.conftest import DRAFTED, Late, Runner, text

PROMPT, ANSWER = text(1, 20), text(2, 40)


def learn(runner: Runner, late: Late, prompt: list[int] = PROMPT, answer: list[int] = ANSWER, **more: Any) -> int:
    """Generate an answer, wait until it is recorded, and return the steps that it took."""
    before = runner.steps
    runner.begin(f"call {before}", prompt, answer, **more)
    assert list(runner.run().values()) == [answer]
    steps_late, late.steps = late.steps, 0
    runner.speculator.begin([])  # a later step finds the copies of the last ones
    late.steps = steps_late
    assert runner.speculator._retriever is not None and runner.speculator._retriever.flush()
    return runner.steps - before


def recorded(cache: SuffixCache) -> list[list[int]]:
    return stored(cache, Namespace("default", "m", "t"))


@pytest.mark.parametrize("steps_late", [0, 1, 2])
def test_what_was_generated_once_is_drafted_though_the_host_is_behind(
    runner: Runner, late: Late, steps_late: int
) -> None:
    late.steps = steps_late
    assert learn(runner, late) == len(ANSWER), "nothing is known of the first answer"
    assert learn(runner, late) <= len(ANSWER) // (DRAFTED + 1) + 1 + steps_late
    predicted = text(9, 40)
    steps = learn(runner, late, text(8, 20), predicted, xargs={"agentspec_prediction": predicted})
    assert steps <= len(predicted) // (DRAFTED + 1) + 1 + steps_late


def test_requests_side_by_side_keep_their_own_text(runner: Runner, late: Late) -> None:
    late.steps = 1
    other = text(3, 40)
    learn(runner, late)
    runner.begin("a", PROMPT, ANSWER)
    runner.begin("b", text(4, 10), other)
    runner.step()
    runner.begin("c", PROMPT, ANSWER)
    assert runner.run() == {"a": ANSWER, "b": other, "c": ANSWER}


def test_whole_outputs_are_recorded_though_they_end_before_their_tokens_arrive(
    runner: Runner, late: Late, cache: SuffixCache
) -> None:
    late.steps = 2
    learn(runner, late)
    assert recorded(cache) == [ANSWER]


def test_tokens_that_are_under_way_when_the_server_stops_are_recorded(
    runner: Runner, late: Late, cache: SuffixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    late.steps = 1000
    runner.begin("a", PROMPT, ANSWER)
    runner.run()
    monkeypatch.undo()  # waiting makes them arrive
    runner.speculator.close()
    assert recorded(cache) == [ANSWER]


def test_the_output_of_a_preempted_request_is_kept_once_and_whole(
    runner: Runner, late: Late, cache: SuffixCache
) -> None:
    runner.begin("a", PROMPT, ANSWER)
    for _ in range(3):
        for _ in range(5):
            runner.step()
        runner.preempt("a")
        runner.begin("a", PROMPT, ANSWER, done=len(runner.outputs["a"]))
    runner.run()
    runner.speculator.close()
    assert recorded(cache) == [ANSWER]


def test_a_request_that_cannot_be_read_costs_its_own_drafts_only(runner: Runner, late: Late) -> None:
    learn(runner, late)
    runner.begin("strange", text(5, 9), text(6, 40), xargs="no fields")
    runner.begin("a", PROMPT, ANSWER)
    while len(runner.outputs["a"]) < len(ANSWER):
        runner.step()
    assert runner.steps - len(ANSWER) <= len(ANSWER) // (DRAFTED + 1) + 2


def test_a_failing_step_costs_no_tokens_of_the_output(
    runner: Runner, late: Late, cache: SuffixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts tokens, since the runner writes -1 where it verifies nothing, into what it was given."""
    runner.begin("a", PROMPT, ANSWER)
    runner.step()
    with monkeypatch.context() as failing:
        runner.speculator.drafts.fill_(-1)
        failing.setattr(runner.speculator, "_match", lambda *_: 1 / 0)  # the device fails
        runner.step()
        assert runner.drafts["a"] == [0] * DRAFTED
    runner.run()
    runner.speculator.close()
    assert recorded(cache) == [ANSWER]


def test_unknown_salts_share_nothing(runner: Runner, late: Late) -> None:
    learn(runner, late, salt="pepper")
    assert learn(runner, late) == len(ANSWER)
    assert learn(runner, late, salt="unknown") == len(ANSWER)
    assert learn(runner, late, salt="unknown") == len(ANSWER)
    assert learn(runner, late, salt="pepper") < len(ANSWER)


def test_all_ranks_get_the_first_ranks_drafts_and_a_dummy_run_touches_nothing(
    runner: Runner, ranks: SimpleNamespace
) -> None:
    ranks.world_size = 2
    runner.begin("a", PROMPT, ANSWER)
    runner.step()
    assert ranks.sent == [([runner.drafts["a"]], 0)]
    before = runner.speculator.drafts.clone()
    batch = SimpleNamespace(req_ids=["_dummy"] * 3, num_reqs=3)
    found = runner.speculator.propose(batch, None, None, None, None, num_sampled=None, dummy_run=True)
    assert found.shape == (3, DRAFTED) and torch.equal(runner.speculator.drafts, before)


class _NoValueIsRead(TorchDispatchMode):
    """Fails where the host would wait for the device: it reads a value, or a shape depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags, func
        assert torch.Tag.dynamic_output_shape not in func.tags, func
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_the_host_never_waits_for_the_device(runner: Runner, late: Late) -> None:
    learn(runner, late)
    runner.begin("a", PROMPT, ANSWER)
    runner.begin("b", PROMPT, ANSWER)
    step = SimpleNamespace(req_ids=["a", "b"], num_reqs=2, idx_mapping=torch.tensor([0, 1], dtype=torch.int32))
    sampled = torch.ones(2, dtype=torch.int32)
    with _NoValueIsRead():
        runner.speculator.propose(step, None, None, None, None, sampled)
    with pytest.raises(AssertionError), _NoValueIsRead():
        sampled[0].item()
