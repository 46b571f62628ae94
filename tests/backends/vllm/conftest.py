"""Requests of a server without the server: what a drafter is told of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from agentspec.backends.engine_plugin.drafter import DraftTurn, ServerDrafter
from agentspec.backends.engine_plugin.request_state import RequestInfo
from agentspec.cache import SuffixCache
from agentspec.cache.index import DEPTH
from agentspec.cache.tokens import Tokens

VOCABULARY = 1000
TEXT = np.arange(100, 160, dtype=np.int32)


def tokens(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


class Client:
    """A request and all of its text."""

    def __init__(self, drafter: ServerDrafter, prompt: Tokens, prediction: Tokens | None = None) -> None:
        info = RequestInfo(prediction=() if prediction is None else tuple(prediction.tolist()), stop_strings=True)
        self.state, self.tokens = drafter.begin_state(prompt, info), prompt

    def turn(self, fresh: Tokens, limit: int) -> DraftTurn:
        self.tokens = np.concatenate((self.tokens, fresh))
        return DraftTurn(self.state, fresh, self.tokens[-DEPTH:], limit)


@pytest.fixture
def cache() -> Iterator[SuffixCache]:
    with SuffixCache.open() as cache:
        yield cache


@pytest.fixture
def drafter(cache: SuffixCache, patient: None) -> Iterator[ServerDrafter]:
    drafter = ServerDrafter(lambda state, prompt: cache.request(prompt), VOCABULARY, chains=True, least=0.1)
    yield drafter
    drafter.close()
