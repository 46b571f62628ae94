"""One forward over rows, chain and tree equals a forward per path, for every family."""

from __future__ import annotations

from typing import Any

import numpy as np

TOLERANCE = 2e-4


def test_rows_after_a_commit_are_as_if_computed_in_a_row(family: Any) -> None:
    rows = family.target.new_cache(1)
    family.target.forward(rows, [1, 2, 3], [9, 4, 5, 8, 6], [-1, -1, 1, 0, 2])
    rows.commit(3, [1, 2, 4])
    logits = family.target.forward(rows, [7])
    assert np.abs(logits[0].cpu().numpy() - family.logits([1, 2, 3, 4, 5, 6, 7])).max() < TOLERANCE


def test_prefill_in_chunks_is_prefill_at_once(family: Any) -> None:
    ids = list(range(40))
    for size in (1, 3, 7, 40):
        rows = family.target.new_cache(1)
        for start in range(0, 39, size):
            family.target.prefill(rows, ids[start : min(start + size, 39)])
        assert rows.length == 39
        assert np.abs(family.target.forward(rows, ids[39:])[0].cpu().numpy() - family.logits(ids)).max() < TOLERANCE


def test_every_family_runs_on_the_fastest_kernel_that_computes_it(family: Any) -> None:
    own = family.target.module.config.model_type in ("gemma2", "gpt_oss")  # soft caps, sinks
    assert family.target.attention == ("eager" if own else "agentspec_grouped")
