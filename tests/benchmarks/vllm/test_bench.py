"""The run over engines from end to end, and what an engine learns from a recorded call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.engine_plugin.drafter import ServerDrafter
from agentspec.benchmarks.vllm.bench import ForcedPlan, lengthened, run_forced
from agentspec.benchmarks.vllm.engine import find_environment
from agentspec.benchmarks.vllm.worker import learn_call
from agentspec.cache import SuffixCache
from agentspec.recordings.replay import EncodedCall

WORDS = "check the order again please and then"
ANSWER = f"{WORDS} {WORDS}"
LONG = 3600.0  # seconds that no stand-in needs
ENVIRONMENT = find_environment(Path(__file__).parents[3])


def test_a_call_is_learned() -> None:
    learned = {"session": "s", "prompt": list(range(40)), "response": list(range(100, 140))}
    with SuffixCache.open() as cache:
        drafter = ServerDrafter(lambda state, prompt: cache.request(prompt), 1000)
        assert learn_call(drafter, learned) == 1
        drafter.close()
        with cache.request([*range(30, 40), *range(100, 110)]) as request:
            assert list(request.draft(4).tokens) == [110, 111, 112, 113]


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(ENVIRONMENT is None, reason="no vLLM: run .ci/vllm-env, or set AGENTSPEC_VLLM_ENV")
def test_real_engines(calls_of: Any, tokenizer: Path) -> None:
    assert ENVIRONMENT is not None
    calls = calls_of("airline", [ANSWER] * 12)
    plan = ForcedPlan(
        ENVIRONMENT / "bin" / "python", "cpu", "tiny", ["agentspec"], traces=[calls], tokenizer=tokenizer, learned=4,
        seconds=LONG, start=400.0, patience=200.0,
    )  # fmt: skip
    report = run_forced(plan)
    assert report.failed == {} and report.left_out == [] and report.sound, report.data()
    assert len(report.calls) == 8 and report.names == ["off", "agentspec"]
    steps = {name: sum(call.runs[name].steps for call in report.calls) for name in report.names}
    assert steps["off"] == 8 * 14 and steps["agentspec"] < steps["off"] / 2
    for turn in ("first time", "again"):
        assert report.answers["agentspec"][turn].steps < report.answers["off"][turn].steps


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=20))
def test_answers_that_are_forced_at_once_have_no_position_in_common(lengths: list[tuple[int, int]]) -> None:
    calls = [EncodedCall("", np.arange(1, 1 + prompt), np.arange(answer)) for prompt, answer in lengths]
    prompts, taken = lengthened(calls), set[int]()
    for call, prompt in zip(calls, prompts, strict=True):
        positions = range(len(prompt), len(prompt) + len(call.response))
        assert taken.isdisjoint(positions) and [token for token in prompt if token] == call.prompt.tolist()
        taken.update(positions)
