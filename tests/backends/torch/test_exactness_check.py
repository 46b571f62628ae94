"""The check that users run: it passes on an exact engine and finds one that is not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.engine import sequence
from agentspec.backends.torch.exactness import COLD, TOGETHER, WARM, ExactnessCase, check_exactness
from agentspec.cache import SuffixCache
from agentspec.types import SamplingParams

pytestmark = pytest.mark.anyio

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [7, 7, 7, 7], [5, 6, 5, 6, 5]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.7, max_tokens=12, seed=3)
QUESTIONS = [ExactnessCase(prompt, sampling) for prompt in PROMPTS for sampling in (GREEDY, SAMPLED)]


@pytest.fixture
async def backend(lab: Any) -> AsyncIterator[TorchBackend]:
    with SuffixCache.open() as cache:
        backend = TorchBackend(lab.loaded, TorchSettings(), cache)
        yield backend
        await backend.aclose()


async def test_an_exact_engine_passes(backend: TorchBackend) -> None:
    said: list[str] = []
    found = await check_exactness(backend, QUESTIONS, said.append)
    assert found.exact and not found.divergences
    assert [found.identical(way) for way in (COLD, WARM, TOGETHER)] == [len(QUESTIONS)] * 3
    assert len(said) == 4 * len(QUESTIONS) and said[1] == "off: answer 2 of 6"
    assert backend.stats().accepted_by_source, "nothing was drafted, so nothing was checked"


async def test_drafts_taken_on_trust_are_found(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def trust(
        tokens: Sequence[int],
        parents: Sequence[int],
        choose: Callable[[int], int],
        emit: Callable[[int, int], bool],
        policy: None = None,
    ) -> list[int]:
        path = []
        for node, token in enumerate(tokens):
            if parents[node] != node - 1:
                break
            if emit(token, node):
                return path
            path.append(node)
        emit(choose(len(path)), len(path))
        return path

    monkeypatch.setattr(sequence, "accept_path", trust)
    found = await check_exactness(backend, QUESTIONS, lambda line: None)
    assert not found.exact
    worst = next(each for each in found.divergences if not each.is_tie)
    off, on = found.answers["off"][worst.question], found.answers[worst.way][worst.question]
    assert off[: worst.position] == on[: worst.position]
    if worst.off >= 0 and worst.on >= 0:
        assert (off[worst.position], on[worst.position]) == (worst.off, worst.on)
        assert worst.gap_apart == pytest.approx(worst.gap_together, abs=1e-4)
        assert worst.gap_apart > 0, "without drafts the better token was taken"
