"""Tokens come back from hidden states of 16 bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentspec.benchmarks.vllm.forced.digits import BASE, DIGITS, digits, tokens_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@given(tokens=st.lists(st.integers(0, BASE**DIGITS - 1), min_size=1, max_size=50))
def test_tokens_come_back(dtype: torch.dtype, tokens: list[int]) -> None:
    rows = torch.full((len(tokens), 8), 3.5, dtype=dtype)
    rows[:, :DIGITS] = digits(tokens).to(dtype)
    assert tokens_of(rows).tolist() == tokens
