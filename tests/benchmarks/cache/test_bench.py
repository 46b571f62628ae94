"""Each cost of the cache is measured."""

from __future__ import annotations

import pytest

from agentspec.benchmarks.cache.costs import TREE, measure_costs, synthetic_tokens
from agentspec.recordings.replay import EncodedCall


@pytest.mark.slow
@pytest.mark.counted
def test_every_cost_is_measured() -> None:
    text = synthetic_tokens(3000)
    calls = [
        EncodedCall(f"s{at // 2}", text[at * 100 : at * 100 + 90], text[at * 100 + 90 :][:100]) for at in range(20)
    ]
    costs = measure_costs(calls, 1500, lambda message: None, cached=3000)
    assert costs.recorded.cached_tokens == costs.synthetic.cached_tokens == 3000
    assert costs.opened.cached_tokens == costs.opened_tokens == 1500
    for work in (costs.recorded, costs.opened, costs.synthetic):
        assert 0 < work.median <= work.p99 < 10 and 1 < work.tree <= TREE
        assert all(0 < one < 10 for one in (work.commit, work.new_prompt))
    assert costs.recorded.known_prompt > 0 and 0 < costs.insert < costs.recorded.commit
    assert (
        8 <= costs.memory_bytes < 40
        and costs.disk_bytes > 1
        and 8 < costs.segment_bytes < 12
        and costs.open_seconds > 0
    )
