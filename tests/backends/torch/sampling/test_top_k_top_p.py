"""What min_p, top_k and top_p keep, the same whether the host may look at values on the way or not."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.backends.torch.sampling.distribution import apply_top_k_top_p
from agentspec.types import SamplingParams


def kept(scores: torch.Tensor, **params: Any) -> list[int]:
    """The surviving ids of one row."""
    patient, hasty = (
        apply_top_k_top_p(scores[None], SamplingParams(**params), may_sync=patient) for patient in (True, False)
    )
    assert torch.equal(patient, hasty)
    left = patient[0] > -torch.inf
    assert torch.equal(patient[0][left], scores[left])
    return left.nonzero()[:, 0].tolist()  # type: ignore[no-any-return]


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=40), st.data())
def test_truncation_keeps_what_it_says(scores: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, 45))
    top_p = data.draw(st.floats(0.05, 0.99))
    values = torch.tensor(scores)
    assert set(kept(values, top_k=top_k)) == {i for i, s in enumerate(scores) if sum(o > s for o in scores) < top_k}
    left = kept(values, top_p=top_p)
    assert values.softmax(0)[left].sum() >= top_p - 1e-5
    lowest = values[left].min()
    assert (values.softmax(0)[values > lowest]).sum() < top_p + 1e-5


def test_a_nucleus_wider_than_the_first_sort_is_found() -> None:
    assert 4480 <= len(kept(torch.linspace(0, 0.001, 5000), top_p=0.9)) <= 4520


def test_top_p_counts_all_that_equal_the_last_of_top_k() -> None:
    """0.4 is less than half of what survives top_k: 0.4 and three times 0.2."""
    scores = torch.log(torch.tensor([0.2, 0.4, 0.2, 0.2]))
    assert kept(scores, top_k=2) == [0, 1, 2, 3] == kept(scores, top_k=2, top_p=0.5)
    assert kept(scores, top_k=2, top_p=0.35) == [1]
