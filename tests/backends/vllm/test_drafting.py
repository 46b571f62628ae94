"""Drafting for a server's requests: what is proposed and recorded. A failure costs drafts, never the server."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from agentspec.backends.engine_plugin.request_state import PrivateCache, RequestCache, RequestState
from agentspec.backends.vllm import drafting
from agentspec.backends.vllm.drafting import ServerDrafter
from agentspec.cache import SuffixCache
from agentspec.cache.index import StepCurve
from agentspec.cache.tokens import Tokens
from tests.backends.vllm.conftest import TEXT, VOCABULARY, Client, tokens

STEP = 0.01  # seconds that a step of the server takes: next to less no draft pays


def answer(
    drafter: ServerDrafter, prompt: Tokens, output: Tokens, limit: int = 8, prediction: Tokens | None = None
) -> list[list[int]]:
    """One request alone, whose target writes `output`; the chain of each round."""
    client = Client(drafter, prompt, prediction)
    chains, at, fresh = [], 1, output[:1]
    while at < len(output):
        (chain,) = drafter.propose([client.turn(fresh, min(limit, len(output) - at))])
        drafter.flush()
        chains.append(chain)
        right = next((i for i, token in enumerate(chain) if token != output[at + i]), len(chain))
        fresh = output[at : at + right + 1]
        at += right + 1
        time.sleep(STEP)
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
    assert drafter.propose([client.turn(tokens(1, 2, 3), 8)]) == [[]]
    told = Client(drafter, tokens(1, 2), tokens(5, 6, VOCABULARY, 7))
    assert drafter.propose([told.turn(tokens(5), 8)]) in ([[]], [[6]])
    other = Client(drafter, np.tile(TEXT, 3))
    drafter.flush()
    for limit in (3, 1, 0):
        (chain,) = drafter.propose([other.turn(TEXT[:3], limit)])
        assert len(chain) <= limit


class Clock:
    """The time of a server whose steps take as long as their tokens say."""

    def __init__(self, fixed: float, token: float) -> None:
        self.now, self._fixed, self._token = 0.0, fixed, token

    def seconds(self, tokens: int) -> float:
        return self._fixed + self._token * tokens

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("predicted", [None, np.tile(TEXT, 2)])
def test_who_is_behind_its_latency_goal_is_served_first(
    drafter: ServerDrafter, monkeypatch: pytest.MonkeyPatch, predicted: Tokens | None
) -> None:
    """Steps so dear that no token pays for two requests; one pays for its own request, where that is late."""
    clock = Clock(0.0, 0.0)
    monkeypatch.setattr(drafting, "perf_counter", clock)
    monkeypatch.setattr(drafter._cost, "observe", lambda *_: None)
    drafter._cost._use(StepCurve(np.array([2.0, 34.0]), np.array([1.0, 21.0])))
    late, early, free = (Client(drafter, np.tile(TEXT, 4), predicted, goal) for goal in (0.5, 100.0, None))
    drafter.flush()

    def drafted(*clients: Client, at: int, to: int) -> list[int]:
        return [len(chain) for chain in drafter.propose([client.turn(TEXT[at:to], 8) for client in clients])]

    assert drafted(late, early, at=0, to=3) == [0, 0]  # three tokens at once are two steps ahead
    clock.now += 1.0
    assert drafted(late, early, at=3, to=4) == [0, 0]  # just on time: the next step's own token is due at its end
    clock.now += 2.0
    served, left = drafted(late, early, at=4, to=5)
    assert served > 0 == left
    clock.now += 2.0
    assert drafted(early, free, at=5, to=6) == [0, 0]


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


def test_a_memory_that_fails_or_cannot_be_had_costs_drafts_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("secret text of a prompt")

    def refuse(state: RequestState, prompt: Tokens) -> RequestCache:
        raise RuntimeError("closed")

    memory = Broken(PrivateCache(TEXT), fail)
    for opened in (lambda state, prompt: memory, refuse):
        caplog.clear()
        drafter = ServerDrafter(opened, VOCABULARY)
        client = Client(drafter, TEXT)
        for _ in range(3):
            (chain,) = drafter.propose([client.turn(TEXT[:3], 4)])
            drafter.flush()
        assert chain == [] and caplog.text.count("without the token cache") == 1 and "secret" not in caplog.text
        drafter.end(client.state)
        drafter.close()
    assert memory.abandoned


def test_a_memory_that_stands_still_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not answer: drafts go on from what is in memory, and no round waits for it."""
    times = itertools.accumulate(itertools.cycle((0.001, 0.0002)))
    monkeypatch.setattr(drafting, "perf_counter", lambda: next(times))  # no search is late, however busy the machine is
    monkeypatch.setattr(drafting, "PATIENCE", 0.1)
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
