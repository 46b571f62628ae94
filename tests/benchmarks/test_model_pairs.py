from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.benchmarks.model_pairs import COLUMNS, PAIRS, ModelPair, PairReport, forecast
from agentspec.benchmarks.reasoning import PUBLISHED, Speeds, predict

PAGE = Path(__file__).parents[2] / "docs" / "reasoning.md"


def test_the_page_says_what_is_computed() -> None:
    table = [f"| {' | '.join(cells)} |" for cells in (COLUMNS, *(one.row() for one in PairReport.of().forecasts))]
    written = PAGE.read_text().splitlines()
    began = written.index(table[0])
    assert written[began : began + 1] + written[began + 2 : began + 1 + len(table)] == table
    assert not written[began + 1 + len(table)].startswith("|")


def test_the_published_pair_gains_what_was_published() -> None:
    found = forecast(PAIRS[0])
    assert found.pair.startswith("QwQ-32B") and found.worth_a_try == "yes"
    assert PUBLISHED[0] < found.spec_reason < 1.1 * PUBLISHED[1]


@given(ratio=st.floats(1.1, 100), faster=st.floats(1.01, 3))
def test_a_faster_small_model_needs_less_and_gains_more(ratio: float, faster: float) -> None:
    one, other = forecast(ModelPair("a", ratio)), forecast(ModelPair("b", ratio * faster))
    assert other.spec_reason >= one.spec_reason and other.speculative_thinking > one.speculative_thinking
    assert all(more >= less for more, less in zip(other.lookahead, one.lookahead, strict=True))
    for less, more in zip(other.needed, one.needed, strict=True):
        assert more is None or (less is not None and less <= more)


@given(ratio=st.floats(1.0, 100))
def test_what_is_worth_a_try_follows_from_the_gains(ratio: float) -> None:
    low, high = predict([18], Speeds(1.0, ratio, 2.0), [0.38, 0.8])
    expected = "no" if high.pipelined < 1.4 else "yes" if low.pipelined >= 1.0 else "if accepted"
    assert forecast(ModelPair("a", ratio)).worth_a_try == expected


def test_models_of_equal_speed_gain_nothing() -> None:
    found = forecast(ModelPair("equal", 1.0))
    assert found.worth_a_try == "no" and found.needed == (1.0, None, None)
    assert found.spec_reason < 1 and found.speculative_thinking < 1 and found.lookahead == pytest.approx((1.0, 1.0))
