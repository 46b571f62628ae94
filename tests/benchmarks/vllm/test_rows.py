"""The simulation of Model Runner V2: which rows it counts as served."""

from __future__ import annotations

import time

import numpy as np
import pytest

from agentspec.backends.vllm.runner_v2 import retrieval
from agentspec.benchmarks.cache.costs import synthetic_tokens
from agentspec.benchmarks.vllm.rows import WARM, simulate

TEXTS = np.split(synthetic_tokens(20_000), range(500, 20_000, 500))


def test_rows_are_served_by_searches_that_are_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    [batch] = simulate(TEXTS, [8], steps=WARM + 10, launch=0)
    assert all(map(all, batch.served)) and sum(batch.tokens) > 2 * 8 * len(batch.tokens)
    assert "100.00 % of rows served" in capsys.readouterr().out


def test_rows_are_not_served_while_they_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    search = retrieval.find_passages
    monkeypatch.setattr(retrieval, "find_passages", lambda *asked: time.sleep(0.1) or search(*asked))
    [batch] = simulate(TEXTS, [4], steps=WARM + 1, launch=1e-6)
    assert sum(map(sum, batch.served)) < 2 * len(batch.served)
