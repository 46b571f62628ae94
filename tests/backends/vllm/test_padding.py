"""Chains at full length where a step then runs as one CUDA graph: when that pays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.vllm.padding import ChainPadding, largest_graph, padding_for
from agentspec.errors import ConfigurationError

WIDTH, VOCABULARY = 4, 1000


def config(mode: str = "FULL", device: str = "cuda", most: int | None = 64) -> Any:
    graphs = SimpleNamespace(decode_mode=lambda: SimpleNamespace(name=mode))
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=graphs, max_cudagraph_capture_size=most),
        device_config=SimpleNamespace(device_type=device),
        speculative_config=SimpleNamespace(num_speculative_tokens=WIDTH),
    )


def test_only_where_steps_run_as_one_graph_and_the_operator_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert largest_graph(config()) == 64
    for other in (config("PIECEWISE"), config("NONE"), config(device="cpu"), config(most=None), SimpleNamespace()):
        assert largest_graph(other) == 0
    assert padding_for(config()) is None
    monkeypatch.setenv("AGENTSPEC_VLLM_PAD", "on")
    assert padding_for(config()) is not None and padding_for(config("PIECEWISE")) is None
    monkeypatch.setenv("AGENTSPEC_VLLM_PAD", "maybe")
    with pytest.raises(ConfigurationError, match="AGENTSPEC_VLLM_PAD"):
        padding_for(config())


@given(st.floats(0.1, 100.0), st.integers(1, 12), st.floats(1.0, 5.0))
def test_chains_are_filled_where_full_steps_gain_more_a_second(graph: float, requests: int, gain: float) -> None:
    padding = ChainPadding(WIDTH, 64)
    for _ in range(8):  # as many are tried
        assert padding.fits([WIDTH] * requests) and padding.pays(requests, gain, gain, 1.0)
        padding.observe(requests, graph)
    assert padding.pays(requests, gain, gain, 1.2 * graph) and not padding.pays(requests, gain, gain, 0.8 * graph)
    assert not padding.fits([WIDTH] * 13) and not padding.fits([WIDTH, WIDTH - 1])
    assert padding.filled([7, 8], 1) == [7, 8, 8, 8] and padding.filled([], 1) == [1] * WIDTH
