from __future__ import annotations

from agentspec.benchmarks.cache.synthetic_text import synthetic_tokens
from agentspec.benchmarks.cache.threads import measure_gains
from agentspec.cache import SuffixCache


def test_gains_are_measured_and_leave_nothing_behind() -> None:
    with SuffixCache.open() as cache:
        gains = measure_gains(cache, synthetic_tokens(2000), 8)
        assert cache.stats().sequences == cache.stats().sessions == 0
    for ratio in (gains.two_threads, gains.batch, gains.two_cores):
        assert 0.05 < ratio < 20
    assert gains.load >= 0
