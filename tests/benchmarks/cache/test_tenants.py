from __future__ import annotations

from agentspec.benchmarks.cache import tenants
from agentspec.benchmarks.cache.tenants import measure_tenancy


def test_everything_is_measured(monkeypatch) -> None:
    for name, value in {"_ROUNDS": 2, "_REQUESTS": 2, "_LAZY": 2000, "_BUDGET": 1 << 20, "_CLOSES": 3}.items():
        monkeypatch.setattr(tenants, name, value)
    found = measure_tenancy(20, lambda message: None)
    assert 1000 < found.empty_bytes < 4096
    assert 0 < found.request_ratio < 100
    assert found.open_seconds > 0 and found.first_draft_seconds > 0
    assert 0 < found.median_close <= found.worst_close
    assert 0.5 < found.budget_share <= found.budget_most < 1.1
