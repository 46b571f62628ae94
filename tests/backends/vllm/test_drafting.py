"""Drafting for a server's requests: what is proposed and recorded. A failure costs drafts, never the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from agentspec.backends.engine_plugin import drafter as drafting
from agentspec.backends.engine_plugin.drafter import ServerDrafter
from agentspec.backends.engine_plugin.request_state import RequestState
from agentspec.cache import CacheRequest, SuffixCache
from agentspec.cache.tokens import Tokens
from tests.backends.vllm.conftest import TEXT, VOCABULARY, Client, tokens


def answer(
    drafter: ServerDrafter, prompt: Tokens, output: Tokens, limit: int = 8, prediction: Tokens | None = None
) -> list[list[int]]:
    """One request alone, whose target writes `output`; the chain of each round."""
    client = Client(drafter, prompt, prediction)
    chains, at, fresh = [], 1, output[:1]
    while at < len(output):
        chain = drafter.propose([client.turn(fresh, min(limit, len(output) - at))])[0].tokens
        drafter.flush()
        chains.append(chain)
        right = next((i for i, token in enumerate(chain) if token != output[at + i]), len(chain))
        fresh = output[at : at + right + 1]
        at += right + 1
    drafter.propose([client.turn(fresh, 0)])
    drafter.end(client.state)
    drafter.flush()
    return chains


def test_a_second_answer_is_drafted_from_the_first(drafter: ServerDrafter, cache: SuffixCache) -> None:
    answer(drafter, tokens(1, 2, 3), TEXT)
    chains = answer(drafter, tokens(4, 5, 3), TEXT)
    assert len(chains) < len(TEXT) / 3
    stats = cache.stats()
    assert stats.sequences == 2
    assert stats.accepted > 40


def test_text_that_goes_on_as_drafted_waits_for_no_search(drafter: ServerDrafter) -> None:
    """What comes after a whole draft is searched for while the step runs."""
    for _ in range(6):
        answer(drafter, tokens(1, 2, 3), TEXT)
    searched = partial(REGISTRY.get_sample_value, "agentspec_drafter_searches_total", {"outcome": "done"})
    before = searched() or 0.0
    rounds = len(answer(drafter, tokens(4, 5, 3), TEXT, limit=4))
    assert rounds <= len(TEXT) / 5 + 1 and (searched() or 0.0) - before <= 2


def test_a_prediction_is_drafted_from_before_everything_else(drafter: ServerDrafter) -> None:
    answer(drafter, tokens(1, 2, 3), np.concatenate((TEXT[:3], TEXT[20:])))
    chains = answer(drafter, tokens(4, 5, 3), TEXT, prediction=TEXT)
    assert chains[0] == TEXT[1:9].tolist() and len(chains) <= len(TEXT) / 8 + 1
    edited = np.concatenate((TEXT[:20], tokens(7, 8), TEXT[20:]))
    chains = answer(drafter, tokens(9, 5, 3), edited, prediction=TEXT[:40])
    assert len(chains) < len(edited) / 3


def test_no_more_than_asked_and_nothing_the_model_does_not_know(drafter: ServerDrafter) -> None:
    foreign = tokens(1, 2, 3, VOCABULARY + 5, 7, 1, 2)
    client = Client(drafter, foreign)
    drafter.flush()
    assert drafter.propose([client.turn(tokens(1, 2, 3), 8)])[0].tokens == []
    told = Client(drafter, tokens(1, 2), tokens(5, 6, VOCABULARY, 7))
    assert drafter.propose([told.turn(tokens(5), 8)])[0].tokens in ([], [6])
    other = Client(drafter, np.tile(TEXT, 3))
    drafter.flush()
    for limit in (3, 1, 0):
        assert len(drafter.propose([other.turn(TEXT[:3], limit)])[0].tokens) <= limit


@pytest.mark.parametrize("requests", [1, 8, 32, 64, 128])
@pytest.mark.parametrize("chains", [True, False])
def test_every_row_is_served_in_the_next_round_where_one_has_no_time(
    cache: SuffixCache, monkeypatch: pytest.MonkeyPatch, requests: int, chains: bool
) -> None:
    """What was known stays: rows go on in it, and what a row has left is not lost to a search that is cut off."""
    drafter = ServerDrafter(lambda state, prompt: cache.request(prompt), VOCABULARY, chains=chains)
    for _ in range(6):  # a large batch drafts what is likely
        answer(drafter, tokens(1, 2, 3), TEXT)
    monkeypatch.setattr(drafting, "PATIENCE", 0.0)
    clients = [Client(drafter, tokens(4, 5, row % VOCABULARY)) for row in range(requests)]
    drafter.flush()
    starts = [row % 20 for row in range(requests)]
    assert drafter.propose([client.turn(TEXT[at : at + 5], 6) for client, at in zip(clients, starts, strict=True)])
    for step in (1, 2):
        drafter.flush()
        ends = [at + 5 + step for at in starts]
        found = drafter.propose(
            [client.turn(TEXT[end - 1 : end], 6) for client, end in zip(clients, ends, strict=True)]
        )
        for end, tree in zip(ends, found, strict=True):
            if chains:
                assert tree.tokens and tree.tokens == TEXT[end : end + len(tree.tokens)].tolist()
            assert TEXT[end] in tree.tokens[: tree.parents.count(-1)]
    drafter.close()


class Broken:
    """A memory that fails, or takes its time."""

    def __init__(self, memory: CacheRequest, act: Callable[[], None]) -> None:
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


def test_a_memory_that_fails_or_cannot_be_had_costs_drafts_only(
    cache: SuffixCache, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("secret text of a prompt")

    def refuse(state: RequestState, prompt: Tokens) -> Any:
        raise RuntimeError("closed")

    memory = Broken(cache.request(TEXT), fail)
    for opened in (lambda state, prompt: memory, refuse):
        caplog.clear()
        drafter = ServerDrafter(opened, VOCABULARY, chains=True)
        client = Client(drafter, TEXT)
        for _ in range(3):
            (chain,) = drafter.propose([client.turn(TEXT[:3], 4)])
            drafter.flush()
        assert chain.tokens == [] and caplog.text.count("without the token cache") == 1 and "secret" not in caplog.text
        drafter.end(client.state)
        drafter.close()
    assert memory.abandoned


def test_a_memory_that_stands_still_holds_nobody_up(cache: SuffixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not answer: drafts go on from what is in memory, and no round waits for it."""
    monkeypatch.setattr(drafting, "PATIENCE", 0.1)
    go = threading.Event()

    def stand_still() -> None:
        go.wait(600)

    memory = Broken(cache.request(np.tile(TEXT, 2)), stand_still)
    drafter = ServerDrafter(lambda state, prompt: memory, VOCABULARY, chains=True)
    client = Client(drafter, TEXT)
    drafter.flush()
    chains = []
    for start in range(0, 40, 2):
        chains += drafter.propose([client.turn(TEXT[start : start + 3], 4)])
    late = Client(drafter, TEXT)
    drafter.propose([late.turn(TEXT[:2], 4)])
    go.set()
    assert sum(bool(chain.tokens) for chain in chains) > 3
    drafter.close()


def test_a_draft_ends_where_it_is_unlikely_to_be_accepted(cache: SuffixCache, patient: None) -> None:
    """Of many ways to go on, each is unlikely."""
    drafter = ServerDrafter(lambda state, prompt: cache.request(prompt), VOCABULARY, chains=True, least=0.5)
    for end in range(100):
        answer(drafter, tokens(1), tokens(7, 8, 200 + end, 9))
    client = Client(drafter, tokens(1))
    drafter.flush()
    assert drafter.propose([client.turn(tokens(7), 8)])[0].tokens == [8]
    drafter.close()


@pytest.mark.parametrize(("requests", "least", "most"), [(1, 3.0, 8.1), (64, 0.0, 0.6), (128, 0.0, 0.2)])
def test_a_large_batch_verifies_likely_tokens_only(
    cache: SuffixCache, patient: None, requests: int, least: float, most: float
) -> None:
    """Of texts that go on in no order a batch of 64 verifies hardly more than none: half a token a row of 8."""
    drafter = ServerDrafter(lambda state, prompt: cache.request(prompt), VOCABULARY, chains=True)
    random, verified = np.random.default_rng(0), 0
    clients = [Client(drafter, random.integers(0, 9, 300, dtype=np.int32)) for _ in range(requests)]
    for _ in range(10):
        drafter.flush()
        turns = [client.turn(random.integers(0, 9, 6, dtype=np.int32), 8) for client in clients]
        verified += sum(len(tree.tokens) for tree in drafter.propose(turns))
    assert least <= verified / requests / 10 < most
    drafter.close()


@pytest.mark.parametrize(("late", "drafted"), [(0, 1), (40, 0)])
def test_the_slowest_of_requests_that_began_together_is_drafted_with_less_likely_tokens(
    cache: SuffixCache, patient: None, late: int, drafted: int
) -> None:
    """Known text goes on in five ways. 63 requests write two tokens a round, one writes one; if late, it is alike."""
    drafter = ServerDrafter(lambda state, prompt: cache.request(prompt), VOCABULARY, chains=True)
    for end in range(50):
        answer(drafter, tokens(1), tokens(7, 8, 200 + end % 5, 9))
    clients = [Client(drafter, tokens(1)) for _ in range(64)]
    drafter.flush()
    random = np.random.default_rng(0)
    for number in range(late + 20):
        going = clients if number >= late else clients[:-1]
        drafter.propose(
            [each.turn(tokens(*random.integers(300, 999, 1 + (each is not clients[-1]))), 0) for each in going]
        )
    *trees, slowest = drafter.propose([client.turn(tokens(7, 8), 1) for client in clients])
    assert len(slowest.tokens) == drafted and not any(tree.tokens for tree in trees)
    drafter.close()
