"""Failures around drafting: they cost drafts, never the server, and no output is recorded with a gap."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import numpy as np
import pytest

from agentspec.backends.engine_plugin.request_state import PrivateCache, RequestCache, RequestState
from agentspec.backends.vllm import drafting
from agentspec.backends.vllm.drafting import ServerDrafter
from agentspec.cache import SuffixCache
from agentspec.cache.tokens import Tokens
from tests.backends.vllm.conftest import TEXT, VOCABULARY, Client, tokens


class Broken:
    """A memory that fails, or takes its time."""

    def __init__(self, memory: RequestCache, act: Callable[[], None]) -> None:
        self.drafter, self.indexes, self._act = memory.drafter, memory.indexes, act
        self.abandoned = False

    def extend(self, tokens: Tokens) -> None:
        self._act()

    def count_draft(self, drafted: int, accepted: int) -> None:
        self._act()

    def close(self, *, ended: bool) -> None:
        self._act()

    def abandon(self) -> None:
        self.abandoned = True


def test_a_memory_that_fails_costs_drafts_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("secret text of a prompt")

    memory = Broken(PrivateCache(TEXT), fail)
    drafter = ServerDrafter(lambda state, prompt: memory, VOCABULARY)
    client = Client(drafter, TEXT)
    for _ in range(3):
        (chain,) = drafter.propose([client.turn(TEXT[:3], 4)])
        drafter.flush()
    assert chain == []
    assert memory.abandoned
    assert caplog.text.count("without the token cache") == 1
    assert "secret" not in caplog.text
    drafter.end(client.state)
    drafter.close()


def test_a_memory_that_cannot_be_had(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(state: RequestState, prompt: Tokens) -> RequestCache:
        raise RuntimeError("closed")

    drafter = ServerDrafter(refuse, VOCABULARY)
    client = Client(drafter, TEXT)
    assert drafter.propose([client.turn(TEXT[:3], 4)]) == [[]]
    drafter.end(client.state)
    drafter.close()
    assert "without the token cache" in caplog.text


def test_a_memory_that_stands_still_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not answer: drafts go on from what is in memory, and no round waits for it."""
    times = itertools.accumulate(itertools.cycle((0.001, 0.0002)))
    monkeypatch.setattr(drafting, "perf_counter", lambda: next(times))
    monkeypatch.setattr(drafting, "PATIENCE", 0.1)  # on a busy machine
    go = threading.Event()

    def stand_still() -> None:
        go.wait(600)

    memory = Broken(PrivateCache(np.tile(TEXT, 2)), stand_still)
    drafter = ServerDrafter(lambda state, prompt: memory, VOCABULARY)
    client = Client(drafter, TEXT)
    drafter.flush()
    chains = []
    for start in range(0, 40, 2):
        chains += drafter.propose([client.turn(TEXT[start : start + 3], 4)])
    late = Client(drafter, TEXT)
    drafter.propose([late.turn(TEXT[:2], 4)])
    go.set()
    assert sum(map(bool, chains)) > 3
    drafter.close()


def test_an_error_of_ours_is_logged_once_and_nothing_is_proposed(caplog: pytest.LogCaptureFixture) -> None:
    with SuffixCache.open() as cache:
        drafter = ServerDrafter(lambda state, prompt: cache.request(prompt), VOCABULARY)
        client = Client(drafter, TEXT)
        drafter.flush()
        client.state.length = None  # type: ignore[assignment]
        for _ in range(2):
            assert drafter.propose([client.turn(TEXT[:2], 4)]) == [[]]
        assert caplog.text.count("went without drafts") == 1
        drafter.close()


def test_a_step_that_cannot_be_learned_from_is_recorded(
    drafter: ServerDrafter, cache: SuffixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "_learn", lambda *_: 1 / 0)
    client = Client(drafter, tokens(1, 2, 3))
    for token in TEXT:
        assert drafter.propose([client.turn(tokens(token), 8)]) == [[]]
    drafter.end(client.state)
    drafter.flush()
    index = cache.request(tokens(1)).indexes[-1][0]
    assert [index.tokens(number).tolist() for number in index.native.usage()[0].tolist()] == [TEXT.tolist()]
