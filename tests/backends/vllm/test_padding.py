"""Chains at full length where a step then runs as one CUDA graph: when, and that no answer changes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentspec.backends.vllm import drafting
from agentspec.backends.vllm.drafting import DraftTurn, ServerDrafter
from agentspec.backends.vllm.padding import ChainPadding, largest_graph, padding_for
from agentspec.cache import SuffixCache
from agentspec.cache.index import DEPTH
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


class Graphs:
    """A server that writes given answers. By its clock a step takes as many seconds as it has tokens or, with as many
    as a full chain for each request, `graph` seconds.
    """

    def __init__(self, graph: float, width: int) -> None:
        self.graph, self.width, self.now = graph, width, 0.0
        self.sizes: list[list[int]] = []

    def answer(self, drafter: ServerDrafter, prompt: np.ndarray, answers: list[np.ndarray]) -> list[list[int]]:
        states = [drafter.begin(prompt) for _ in answers]
        drafter.flush()
        given, fresh = [1] * len(answers), [answer[:1] for answer in answers]
        while min(map(len, answers)) - max(given) > self.width:
            texts = [np.concatenate((prompt, a[:n])) for a, n in zip(answers, given, strict=True)]
            turns = [DraftTurn(s, f, t[-DEPTH:], WIDTH) for s, f, t in zip(states, fresh, texts, strict=True)]
            chains = drafter.propose(turns)
            drafter.flush()
            self.sizes.append([len(chain) for chain in chains])
            full = all(len(chain) == self.width for chain in chains)
            self.now += self.graph if full else sum(1 + len(chain) for chain in chains)
            for i, chain in enumerate(chains):
                following = answers[i][given[i] :].tolist()
                right = next((k for k, token in enumerate(chain) if token != following[k]), len(chain))
                fresh[i] = answers[i][given[i] : given[i] + right + 1]
                given[i] += right + 1
        for state in states:
            drafter.end(state)
        return [a[:n].tolist() for a, n in zip(answers, given, strict=True)]


@pytest.mark.parametrize(("graph", "pays"), [(0.5, True), (100.0, False)])
def test_a_server_whose_full_steps_are_cheap_and_one_whose_are_not(
    cache: SuffixCache, patient: None, monkeypatch: pytest.MonkeyPatch, graph: float, pays: bool
) -> None:
    server, rng = Graphs(graph, WIDTH), np.random.default_rng(0)
    ticks = itertools.count()
    monkeypatch.setattr(drafting, "perf_counter", lambda: server.now + 1e-9 * next(ticks))
    drafter = ServerDrafter(
        lambda state, prompt: cache.request(prompt), VOCABULARY, padding=lambda: ChainPadding(WIDTH, 64)
    )
    prompt = np.arange(1, 9, dtype=np.int32)
    answers = [rng.integers(10, 900, 160).astype(np.int32) for _ in range(2)]
    found = server.answer(drafter, prompt, answers)
    assert all(given == answer[: len(given)].tolist() for given, answer in zip(found, answers, strict=True))
    full = [set(sizes) == {WIDTH} for sizes in server.sizes[40:]]
    assert all(full) if pays else not any(full)
    drafter.close()
