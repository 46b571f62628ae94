"""What the benchmark lets a cache learn is drafted from, whichever runner's drafter holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentspec.backends.vllm.drafting import ServerDrafter
from agentspec.backends.vllm.runner_v2.passages import PassageShape
from agentspec.backends.vllm.runner_v2.retrieval import PassageRetriever
from agentspec.benchmarks.vllm.worker import learn_call
from agentspec.cache import SuffixCache

CALL = {"session": "s", "prompt": list(range(40)), "response": list(range(100, 140))}


def drafter(cache: SuffixCache) -> ServerDrafter:
    return ServerDrafter(lambda state, prompt: cache.request(prompt), 1000)


def retriever(cache: SuffixCache) -> PassageRetriever:
    return PassageRetriever(
        lambda state, prompt: cache.request(prompt), 1000, PassageShape(rows=3, overlap=5, width=21)
    )


@pytest.mark.parametrize("made", [drafter, retriever])
def test_a_call_is_learned(made: Callable[[SuffixCache], Any]) -> None:
    with SuffixCache.open() as cache:
        ours = made(cache)
        assert learn_call(ours, CALL) == 1
        ours.close()
        with cache.request([*range(30, 40), *range(100, 110)]) as request:
            assert list(request.draft(4).tokens) == [110, 111, 112, 113]
