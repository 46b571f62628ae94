"""Which requests of a batch get passages, where a round has no time to search for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from agentspec.backends.engine_plugin import rounds
from agentspec.backends.engine_plugin.request_state import RequestInfo
from agentspec.backends.vllm.runner_v2 import retrieval
from agentspec.backends.vllm.runner_v2.passages import shape_for
from agentspec.backends.vllm.runner_v2.retrieval import PassageRetriever
from agentspec.cache import SuffixCache
from agentspec.cache.index import DraftJob, propose_batch
from agentspec.cache.tokens import EMPTY
from agentspec.types import Draft

SERVED = 5  # searches that a round has time for
TEXT = np.arange(100, 900, dtype=np.int32)
NOTHING = Draft(EMPTY, EMPTY, np.array([], dtype=np.float32), EMPTY, np.array([], dtype=np.uint8))


@pytest.fixture
def in_time(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that counts: rounds are late, and have time for as many searches as the list's last number."""
    served = [SERVED]

    def searched(jobs: Sequence[DraftJob], patience: float) -> list[Draft]:
        return [*propose_batch(jobs[: served[-1]]), *[NOTHING] * (len(jobs) - served[-1])]

    monkeypatch.setattr(retrieval, "PATIENCE", 0.0)
    monkeypatch.setattr(rounds, "propose_batch", searched)
    return served


@pytest.mark.parametrize("count", [1, 8, 32, 64, 128])
def test_every_request_has_passages_soon_and_keeps_them(cache: SuffixCache, in_time: list[int], count: int) -> None:
    with cache.request([1]) as past:
        past.extend(TEXT)
    retriever = PassageRetriever(lambda state, prompt: cache.request(prompt), 1000, shape_for(4))
    requests = [retriever.begin(np.array([1, 2, row], dtype=np.int32), RequestInfo()) for row in range(count)]
    retriever.advance([(request, TEXT[row : row + 9]) for row, request in enumerate(requests)])
    assert retriever.flush()
    for step in range(1, 2 * -(-count // SERVED) + 1):
        found = retriever.retrieve(requests)
        known = [row for row in range(count) if TEXT[row + 9] in found[row]]
        assert len(known) == min(count, step * SERVED)
    found = retriever.retrieve(requests)
    in_time.append(0)  # a round without any time takes nothing away
    assert np.array_equal(retriever.retrieve(requests), found)
    retriever.close()
