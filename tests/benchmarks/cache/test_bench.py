"""Each cost of the cache is measured."""

from __future__ import annotations

import pytest

from agentspec.benchmarks.cache.costs import TREE, measure_costs


@pytest.mark.slow
@pytest.mark.counted
def test_every_cost_is_measured() -> None:
    costs = measure_costs(1500, lambda message: None, cached=3000)
    assert costs.draft.cached_tokens == 3000 and costs.opened_tokens == 1500
    assert 0 < costs.draft.median <= costs.draft.p99 <= costs.draft.longest < 10
    assert 1 < costs.draft.tree <= TREE
    for value in (costs.insert, costs.record, costs.request_start, costs.open_seconds):
        assert 0 < value < 10
    assert costs.insert < costs.record  # recording includes it
    assert 8 <= costs.memory_bytes < 40 and costs.disk_bytes > 1
    assert costs.segment_bytes is not None and 8 < costs.segment_bytes < 12
