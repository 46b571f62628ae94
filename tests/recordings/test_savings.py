from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agentspec.recordings.replay import measure, print_savings, replay_cache
from agentspec.recordings.traces import EncodedCall


def call(*tokens: int) -> EncodedCall:
    return EncodedCall("s", np.array([1, 2], np.int32), np.array(tokens, np.int32))


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=25))
def test_the_whole_and_its_course_agree(answers: list[list[int]]) -> None:
    replay = replay_cache([call(*answer) for answer in answers], 8)
    savings = measure(replay)
    assert savings.tokens == sum(map(len, answers)) and savings.steps == sum(replay.steps) <= savings.tokens
    assert savings.saved == pytest.approx(1 - 1 / savings.tokens_per_step)
    windows = [replay.steps[i : i + savings.window] for i in range(0, savings.calls, savings.window)]
    assert len(windows) == len(savings.hit_rate_over_time) == len(savings.tokens_per_step_over_time) <= 10
    hits = sum(rate * sum(steps) for rate, steps in zip(savings.hit_rate_over_time, windows, strict=True))
    assert hits == pytest.approx(savings.hit_rate * savings.steps)
    assert hits == pytest.approx(sum(bool(nodes.any()) for nodes in replay.accepted))


def test_what_is_shown() -> None:
    savings = measure(replay_cache([call(5, 6, 7, 8, 9)] * 30, 8))
    out = io.StringIO()
    print_savings(savings, Console(file=out, width=100))
    assert (
        "1-3" in out.getvalue() and "28-30" in out.getvalue() and f"{savings.saved:.0%} of its steps" in out.getvalue()
    )
