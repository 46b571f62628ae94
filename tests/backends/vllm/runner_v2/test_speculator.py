"""Drafting one or two steps late, on a runner in miniature; in a whole server: ../test_server.py."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from agentspec.backends.engine_plugin.rounds import metric
from agentspec.backends.vllm.runner_v2 import retrieval
from agentspec.cache import SuffixCache
from agentspec.types import Namespace
from tests.backends.conftest import followed_requests, stored
from tests.backends.vllm.runner_v2.conftest import DRAFTED, LONGEST, REQUESTS, Late, Runner, new_request, text

PROMPT, ANSWER = text(1, 20), text(2, 40)


def learn(runner: Runner, late: Late, prompt: list[int] = PROMPT, answer: list[int] = ANSWER, **more: Any) -> int:
    """Generate an answer, wait until it is recorded, and return the steps that it took."""
    before = runner.steps
    runner.begin(f"call {before}", prompt, answer, **more)
    assert list(runner.run().values()) == [answer]
    steps_late, late.steps = late.steps, 0
    runner.settle()
    late.steps = steps_late
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


def test_adaptive_verification_gets_the_confidence_in_each_token(runner: Runner, late: Late) -> None:
    """Where vLLM asks for it: the known text is worth verifying, what repeats by chance is not."""
    runner.speculator.enable_adaptive_verification = True
    for _ in range(3):
        learn(runner, late)
    noise = np.random.default_rng(0).integers(0, 30, 60).tolist()
    runner.begin("noise", noise[:20], noise[20:])
    runner.begin("silent", PROMPT, ANSWER, xargs={"agentspec_speculation": "off"})
    runner.begin("known", PROMPT, ANSWER)
    for _ in range(5):
        runner.step()
    by_name = dict(zip(runner.rows, runner.speculator.draft_token_confidence_probs.tolist(), strict=False))
    assert min(by_name["known"]) > 0.7 and max(by_name["noise"][:2]) < 0.5 and by_name["silent"] == [0.0] * DRAFTED
    runner.run()


def test_what_is_not_verified_any_more_may_become_likely_again(runner: Runner, late: Late) -> None:
    runner.speculator.enable_adaptive_verification = True
    confidence, runs = runner.speculator.draft_token_confidence_probs, np.random.default_rng(0).integers(0, 30, (9, 25))
    runner.begin("noise", [900], runs.flatten().tolist())
    while len(runner.outputs["noise"]) < runs.size:
        runner.step()
    unlikely = float(confidence[0, 0])
    runner.finish("noise")
    runner.begin("regular", [901], [1, 2, 3] * 60)
    for _ in range(100):
        runner.drafts["regular"] = []  # vLLM verifies none
        runner.step()
    assert unlikely < 0.3 and float(confidence[0, 0]) > 0.8
    runner.finish("regular")


@pytest.mark.parametrize("requests", [1, 8, 32, 64, REQUESTS])
def test_every_row_of_a_batch_is_served_within_two_steps(runner: Runner, late: Late, requests: int) -> None:
    """Rows jump from one known text to another, each at a step of its own."""
    texts = [list(range(start, start + 40)) for start in (0, 100, 200)]
    for known in texts:
        learn(runner, late, answer=known)
    late.steps, jumps = 1, [5 + row % 25 for row in range(requests)]
    for row, jump in enumerate(jumps):
        answer = [*texts[row % 3][:jump], *texts[(row + 1) % 3][row % 7 :]]
        runner.begin(f"{row}", [900], answer, xargs={"agentspec_store": "off"})
    begun = [0] * requests  # the step that sampled a row's first token of the text that it follows
    lengths = [0] * requests
    for step in range(14):
        runner.step()
        for row, jump in enumerate(jumps):
            before, length = lengths[row], len(runner.outputs[f"{row}"])
            lengths[row] = length
            if before == 0 or before <= jump < length:
                begun[row] = step
            if step >= begun[row] + 2 and jump != length < len(runner.answers[f"{row}"]):
                assert runner.drafts[f"{row}"][0] == runner.answers[f"{row}"][length], (row, length)


def test_what_vllm_does_not_verify_in_a_large_batch_does_not_count(runner: Runner, late: Late) -> None:
    """vLLM's schedule may have fewer tokens verified than are drafted."""
    learn(runner, late)
    runner.verified, kinds = 2, ("draft_tokens", "accepted_tokens")
    before = [metric(kind, "cache", "default")._value.get() for kind in kinds]
    steps = learn(runner, late)
    drafted, accepted = (metric(kind, "cache", "default")._value.get() for kind in kinds)
    assert (drafted - before[0], accepted - before[1]) == (2 * (steps - 1), len(ANSWER) - steps)


def test_what_is_known_is_drafted_while_a_search_takes_long(
    runner: Runner, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(runner, late)
    runner.begin("a", PROMPT, ANSWER)
    go, search = threading.Event(), retrieval.find_passages
    monkeypatch.setattr(retrieval, "find_passages", lambda *job: go.wait(60) and search(*job))
    for _ in range(4):
        runner.step(settle=False)
    go.set()
    assert len(runner.outputs["a"]) == 1 + 3 * (DRAFTED + 1)
    runner.run()


TENANTS = {None: range(100, 110), "pepper": range(200, 210), "unknown": range(300, 310), "other": range(400, 410)}
COMMON = [*range(500, 505)] * 2  # tokens after which each goes on otherwise


@given(st.data())
def test_tokens_of_one_tenant_are_never_drafted_for_another(runner: Runner, late: Late, data: st.DataObject) -> None:
    """Requests come, go and are preempted in one batch, in any order, and take each other's rows."""
    try:
        play(runner, late, data)
    finally:  # also where an example ends in a draw: the next one begins without requests
        runner.finish(*runner.rows)
        late.steps = 0
        runner.settle()


def play(runner: Runner, late: Late, data: st.DataObject) -> None:
    late.steps = data.draw(st.sampled_from([0, 1]))
    salts: dict[str, str | None] = {}
    for number in range(data.draw(st.integers(5, 25))):
        act = data.draw(st.sampled_from(["begin", "step", "step", "finish", "preempt"]))
        if act == "begin" and len(runner.rows) < 5:
            salt = data.draw(st.sampled_from(list(TENANTS)))
            tokens = st.lists(st.sampled_from([*TENANTS[salt], *COMMON]), min_size=4, max_size=20)
            prompt, output = data.draw(tokens), data.draw(tokens) * 4
            salts[f"{number}"] = salt
            runner.begin(f"{number}", prompt, output, salt=salt)
        elif act == "step" and runner.rows:  # an engine takes no step without requests
            runner.step(settle=data.draw(st.booleans()))
        elif runner.rows:
            name = data.draw(st.sampled_from(sorted(runner.rows)))
            runner.finish(name) if act == "finish" else runner.preempt(name)
        for name in runner.rows:
            assert set(runner.drafts[name]) <= {*TENANTS[salts[name]], *COMMON}


class Gate:
    """Lets through one search at a time, when told to."""

    def __init__(self, retriever: retrieval.PassageRetriever, monkeypatch: pytest.MonkeyPatch) -> None:
        self._retriever, self._search = retriever, retrieval.find_passages
        self.left: list[list[int]] = []  # tokens that what is searched for had left
        self.waits, self._go = threading.Semaphore(0), threading.Semaphore(0)
        monkeypatch.setattr(retrieval, "find_passages", self._find)

    def _find(self, *asked: Any) -> Any:
        self.left.append([passages.left for passages, *_ in asked[0]])
        self.waits.release()
        return self._go.acquire(timeout=60) and self._search(*asked)

    def let_through(self) -> None:
        """The search that waits, or the next that comes, and wait for what it finds."""
        before = self._retriever.found
        assert self.waits.acquire(timeout=60)
        self._go.release()
        while self._retriever.found is before:
            time.sleep(0.001)

    def open(self) -> None:
        for _ in range(1000):
            self._go.release()


@pytest.mark.parametrize("searches", [0, 1, 2])
def test_a_row_holds_nothing_of_the_request_that_had_it_before(
    runner: Runner, late: Late, monkeypatch: pytest.MonkeyPatch, searches: int, retriever: retrieval.PassageRetriever
) -> None:
    """Also by the search that was going on when that ended, and by the next one, which is for others."""
    learn(runner, late)
    runner.begin("other", text(8, 20), text(9, 200))
    runner.begin("a", PROMPT, ANSWER)
    for _ in range(2):
        runner.step()
    assert runner.drafts["a"][0] in ANSWER
    gate = Gate(retriever, monkeypatch)
    monkeypatch.setattr(runner, "settle", lambda: None)
    runner.step()
    assert gate.waits.acquire(timeout=60)
    gate.waits.release()
    runner.finish("a")
    for search in range(searches):
        if search:
            runner.step()
        gate.let_through()
    runner.begin("b", PROMPT, ANSWER, done=len(runner.outputs["a"]), salt="pepper")
    runner.step()
    assert not {*runner.drafts["b"]} & {*ANSWER[len(runner.outputs["b"]) :]}
    gate.open()


def test_whole_outputs_are_recorded_though_they_end_before_their_tokens_arrive(
    runner: Runner, late: Late, cache: SuffixCache
) -> None:
    """One at its length limit, the other at the model's."""
    late.steps, longest = 2, text(3, LONGEST - len(PROMPT))
    learn(runner, late)
    learn(runner, late, answer=longest, max_tokens=None)
    assert recorded(cache) == sorted([ANSWER, longest])


@pytest.mark.parametrize("ended", [True, False])
def test_tokens_that_are_under_way_when_the_server_stops_are_recorded(
    runner: Runner, late: Late, cache: SuffixCache, ended: bool
) -> None:
    """Also where the server does not come to end the request; what is not whole is not kept."""
    late.steps = 1000
    runner.begin("a", PROMPT, ANSWER)
    runner.begin("b", PROMPT, ANSWER * 2)
    while len(runner.outputs["a"]) < len(ANSWER):
        runner.step()
    if ended:
        runner.finish("a")
    late.steps = 0
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


@pytest.mark.parametrize(
    ("second", "salts", "together"),
    [("1_a", (None, None), True), ("1_b", (None, None), False), ("1_a", ("x", "x"), True), ("1_a", ("x", "y"), False)],
)
def test_samples_of_one_prompt_draft_from_each_other(
    runner: Runner, late: Late, second: str, salts: tuple[str | None, str | None], together: bool
) -> None:
    runner.begin("0_a", PROMPT, ANSWER, salt=salts[0])
    for _ in range(30):
        runner.step()
    runner.begin(second, PROMPT, ANSWER, salt=salts[1])
    runner.run()
    assert (runner.steps < 30 + len(ANSWER) // 2) is together


@pytest.mark.parametrize("steps_late", [0, 1])
@pytest.mark.parametrize("before", [1, 3, 6])
def test_what_is_forgotten_during_a_request_does_not_come_back(
    runner: Runner, late: Late, cache: SuffixCache, steps_late: int, before: int
) -> None:
    """Neither passages on the device nor the request's own output, which ends later."""
    for _ in range(2):
        learn(runner, late)
    runner.begin("a", PROMPT, ANSWER)
    late.steps = steps_late
    for _ in range(before):
        runner.step()
    assert runner.drafts["a"][0] in ANSWER[len(runner.outputs["a"]) :]
    cache.forget(tenant="default")
    for _ in range(4):
        runner.step()
        assert not set(runner.drafts["a"]) & set(ANSWER[len(runner.outputs["a"]) :])
    runner.run()
    late.steps = 0
    runner.settle()
    assert recorded(cache) == [] and learn(runner, late) == len(ANSWER)


def test_a_request_that_ends_before_its_cache_opens_leaves_nothing_in_its_row(
    runner: Runner, late: Late, monkeypatch: pytest.MonkeyPatch, retriever: retrieval.PassageRetriever
) -> None:
    learn(runner, late)
    monkeypatch.setattr(runner, "settle", lambda: None)
    opens, closes, before = threading.Event(), threading.Event(), retriever.found
    retriever._recorder.run(lambda: assert_set(opens))
    runner.begin("a", PROMPT, ANSWER)
    retriever._recorder.run(lambda: assert_set(closes))
    runner.finish("a")
    opens.set()
    while retriever.found is before:
        time.sleep(0.001)
    runner.begin("b", PROMPT, ANSWER, salt="pepper")
    runner.step()
    assert not {*runner.drafts["b"]} & {*ANSWER[1:]}
    closes.set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_what_was_forgotten_is_gone_while_others_are_searched_for(
    runner: Runner,
    late: Late,
    cache: SuffixCache,
    monkeypatch: pytest.MonkeyPatch,
    retriever: retrieval.PassageRetriever,
) -> None:
    learn(runner, late)
    for name in "ab":
        runner.begin(name, PROMPT, ANSWER)
    for _ in range(2):
        runner.step()
    monkeypatch.setattr(retrieval, "SEARCHED", 1)
    gate = Gate(retriever, monkeypatch)
    monkeypatch.setattr(runner, "settle", lambda: None)
    cache.forget(tenant="default")
    runner.step()
    gate.let_through()
    runner.step()
    for name in "ab":
        assert not set(runner.drafts[name]) & set(ANSWER[len(runner.outputs[name]) :])
    gate.open()


def test_who_has_the_fewest_tokens_left_is_searched_for_first(
    runner: Runner, late: Late, monkeypatch: pytest.MonkeyPatch, retriever: retrieval.PassageRetriever
) -> None:
    learn(runner, late)
    runner.begin("known", PROMPT, ANSWER)
    runner.begin("new", text(8, 20), text(9, 200))
    while len(runner.outputs["known"]) < len(ANSWER) // 2:
        runner.step()
    monkeypatch.setattr(retrieval, "SEARCHED", 1)
    gate = Gate(retriever, monkeypatch)
    monkeypatch.setattr(runner, "settle", lambda: None)
    runner.step()
    for _ in range(2):
        gate.let_through()
    assert gate.left[0] == [0] < gate.left[1]
    gate.open()


@pytest.mark.parametrize("requests", [400, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_requests_leave_nothing_behind_in_memory(runner: Runner, late: Late, requests: int) -> None:
    """Salted or not, stored or not, in groups, preempted, aborted before their tokens arrive."""
    rng, before = random.Random(1), followed_requests()
    for number in range(requests // 4):
        late.steps = rng.randrange(2)
        names = [f"{sample}_{number}" for sample in range(4)]
        runner.rows.clear()
        runner.rows.update({name: row for row, name in enumerate(names)})
        xargs = {"agentspec_store": rng.choice(["on", "off", "off"])}
        salts = [rng.choice([None, "pepper", "x"]) for _ in names]
        news = [new_request(name, [number % 900], [number % 900], xargs=xargs, salt=salt, max_tokens=rng.choice([1, 9]))
                for name, salt in zip(names, salts, strict=True)]  # fmt: skip
        runner.speculator.begin(news)
        runner.states.total_len.gpu[:4] = 2
        runner.answers, runner.outputs = {name: [5, 6, 7] for name in names}, {name: [] for name in names}
        runner.drafts = {name: [] for name in names}
        runner.step(settle=False)
        runner.speculator.finish(names[:3], names[3:] if rng.random() < 0.5 else ())
        runner.speculator.finish(names)
        if number % 50 == 0:
            late.steps = 0
            runner.settle()
    late.steps = 0
    runner.settle()
    runner.rows.clear()
    del news
    assert not followed_requests() - before


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
    step.idx_mapping_np = step.idx_mapping.numpy()
    sampled = torch.ones(2, dtype=torch.int32)
    with _NoValueIsRead():
        runner.speculator.propose(step, None, None, None, None, sampled)
    with pytest.raises(AssertionError), _NoValueIsRead():
        sampled[0].item()


class _Operations(TorchDispatchMode):
    """Notes what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("requests", [1, 32])
def test_a_step_costs_the_engine_no_operation_but_the_kernel(
    runner: Runner, late: Late, monkeypatch: pytest.MonkeyPatch, requests: int, retriever: retrieval.PassageRetriever
) -> None:
    learn(runner, late)
    for row in range(requests):
        runner.begin(f"{row}", PROMPT, ANSWER)
    runner.step()
    while retriever.found is runner.speculator._found:
        runner.step()
    monkeypatch.setattr(runner.speculator, "_match", lambda *_: None)  # one kernel on a GPU
    for ends, _ in runner.speculator._spare:
        ends.zero_()
    batch = SimpleNamespace(req_ids=list(runner.rows), num_reqs=requests, idx_mapping=torch.arange(requests))
    sampled = torch.zeros(requests, dtype=torch.int32)
    for newer in (True, False):  # passages than those that are used
        assert (retriever.found is not runner.speculator._found) is newer
        with _Operations() as seen:
            runner.speculator.propose(batch, None, None, None, None, sampled)
        assert not seen.names
        runner.settle()
