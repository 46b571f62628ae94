"""Drafting for a server's requests: what is proposed, what is remembered, and what may not get in the way."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from agentspec.backends.vllm import drafting
from agentspec.backends.vllm.drafting import ServerDrafter
from agentspec.cache import SuffixCache
from agentspec.cache.chains import ChainTurn, StepCurve, propose_chains
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


def test_a_wrong_prediction_is_soon_left_alone(drafter: ServerDrafter) -> None:
    output = np.random.default_rng(0).integers(0, 5, 100).astype(np.int32)
    client = Client(drafter, tokens(1), tokens(*range(200, 230)))
    client.turn(output, 8)
    client.state.advance(output)
    assert client.state.from_prediction(8) == []


def test_a_prediction_of_what_the_model_does_not_know_is_cut(drafter: ServerDrafter) -> None:
    client = Client(drafter, tokens(1, 2), tokens(5, 6, VOCABULARY, 7))
    (chain,) = drafter.propose([client.turn(tokens(5), 8)])
    assert chain in ([], [6])


def test_a_prompt_is_drafted_from_at_once(drafter: ServerDrafter) -> None:
    prompt = np.concatenate((TEXT, tokens(1, 2)))
    client = Client(drafter, prompt)
    drafter.flush()
    (chain,) = drafter.propose([client.turn(TEXT[:3], 4)])
    assert chain == TEXT[3:7].tolist()[: len(chain)]
    assert chain


def test_no_more_than_asked_and_nothing_the_model_does_not_know(drafter: ServerDrafter) -> None:
    foreign = tokens(1, 2, 3, VOCABULARY + 5, 7, 1, 2)
    client = Client(drafter, foreign)
    drafter.flush()
    assert drafter.propose([client.turn(tokens(1, 2, 3), 8)]) == [[]]
    other = Client(drafter, np.tile(TEXT, 3))
    drafter.flush()
    for limit in (3, 1, 0):
        (chain,) = drafter.propose([other.turn(TEXT[:3], limit)])
        assert len(chain) <= limit


def test_requests_side_by_side(drafter: ServerDrafter) -> None:
    """Each gets what follows its own text, in the order asked, and those without a past get nothing."""
    others = [np.arange(200 + 50 * i, 240 + 50 * i, dtype=np.int32) for i in range(3)]
    clients = [Client(drafter, text) for text in others] + [Client(drafter, tokens(1))]
    drafter.flush()
    turns = [c.turn(text[:4], 4) for c, text in zip(clients, [*others, tokens(7, 8, 9, 10)], strict=True)]
    chains = drafter.propose(turns)
    for chain, text in zip(chains, others, strict=False):
        assert chain
        assert chain == text[4 : 4 + len(chain)].tolist()
    assert chains[3] == []


def test_a_text_that_does_not_repeat_is_soon_left_alone(
    drafter: ServerDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a step takes a millisecond and drafting for it a fifth of one."""
    times = itertools.accumulate(itertools.cycle((0.001, 0.0002)))
    monkeypatch.setattr(drafting, "perf_counter", lambda: next(times))
    rng = np.random.default_rng(0)
    client = Client(drafter, rng.integers(0, 5, 500).astype(np.int32))
    asked = []
    for _ in range(200):
        drafter.propose([client.turn(rng.integers(0, 5, 1).astype(np.int32), 8)])
        drafter.flush()
        asked.append(client.state.asked)
    assert sum(asked[100:]) < 60


def test_a_long_copy_is_searched_for_once_in_a_while(drafter: ServerDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step verifies four tokens of a chain that is longer."""
    answer(drafter, tokens(1, 2, 3), TEXT)
    drafter._cost._use(StepCurve(np.array([1.0, 5.0, 6.0]), np.array([1.0, 1.0, 1e6])))
    monkeypatch.setattr(drafter._cost, "observe", lambda *_: None)
    monkeypatch.setattr(drafter._trials, "begin", lambda: False)  # whether a trial comes is told by the clock
    searched: list[int] = []

    def counting(turns: Sequence[ChainTurn], *more: Any, **how: Any) -> list[list[int]]:
        searched.extend(1 for turn in turns if turn.drafter)
        return propose_chains(turns, *more, **{**how, "floor": 0.0})

    monkeypatch.setattr(drafting, "propose_chains", counting)
    chains = answer(drafter, tokens(1, 2, 3), TEXT, limit=32)
    assert sum(map(len, chains)) > len(TEXT) / 2 and max(map(len, chains)) == 4
    assert len(searched) <= len(chains) / 2


class Clock:
    """The time of a server whose steps take as long as their tokens say."""

    def __init__(self, fixed: float, token: float) -> None:
        self.now, self._fixed, self._token = 0.0, fixed, token

    def seconds(self, tokens: int) -> float:
        return self._fixed + self._token * tokens

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("clock", [Clock(0.075, 0.005), Clock(0.02, 0.0005)])
def test_what_a_step_costs_is_learned_while_requests_come_and_go(
    drafter: ServerDrafter, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Answers of three steps each, so that no two rounds have the same requests, beside prompts that are read."""
    monkeypatch.setattr(drafting, "perf_counter", clock)
    running: list[tuple[Client, int]] = []
    for step in range(60):
        computed = 20 + sum(1 + client.state.chain.drafted for client, _ in running)
        clock.now += clock.seconds(computed)
        running = [(client, at + 4) for client, at in running if at < 8] + [(Client(drafter, TEXT[: 30 + step % 7]), 0)]
        drafter.flush()
        drafter.propose([client.turn(TEXT[at : at + 4], 16) for client, at in running], computed=computed)
    drafter.flush()
    for size in (24, 40, 64):
        assert drafter._cost.seconds(size) == pytest.approx(clock.seconds(size), rel=0.1)


def test_of_large_steps_those_that_read_no_prompt_are_learned_from(
    drafter: ServerDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[int] = []
    monkeypatch.setattr(drafting, "LARGE", 2)
    monkeypatch.setattr(drafter._cost, "observe", lambda tokens, seconds: learned.append(tokens))
    clients = [Client(drafter, TEXT) for _ in range(3)]
    drafter.flush()
    for computed, drafted in ((3, 0), (3, 0), (4, 0), (2, 8), (4, 0)):
        drafter.propose([client.turn(tokens(100), drafted) for client in clients], computed=computed)
    assert learned == [3, 2, 4]  # the first round knows no step before it; in the last step drafts were verified


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


def test_drafts_that_were_thought_too_dear_are_tried_again(
    drafter: ServerDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that repeats, and steps that take as long whatever they hold: the drafter has learned otherwise."""
    monkeypatch.setattr(drafting, "perf_counter", clock := Clock(0.01, 0.0))
    for _ in range(100):
        drafter._cost.observe(1, 0.01)
        drafter._cost.observe(9, 0.2)
    drafter.propose([])
    client = Client(drafter, np.tile(TEXT, 3))
    drafter.flush()
    lengths, at = [], 0
    for _ in range(120):
        fresh = np.take(TEXT, range(at, at + 1 + client.state.chain.drafted), mode="wrap")
        lengths.append(len(drafter.propose([client.turn(fresh, 8)], computed=len(fresh))[0]))
        at += len(fresh)
        clock.now += clock.seconds(1 + lengths[-1])
        drafter.flush()
    assert lengths[:5] == [0] * 5
    assert lengths[-10:] == [8] * 10


def test_what_is_less_likely_than_pays_for_finding_it_is_not_searched_for(
    drafter: ServerDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "perf_counter", clock := Clock(0.01, 0.0))
    client = Client(drafter, TEXT)
    for _ in range(150):
        clock.now += clock.seconds(4)
        drafter.propose([client.turn(TEXT[:4], 0)], computed=4)
    monkeypatch.setattr(drafter._trials, "begin", lambda: False)
    assert drafter._curve([])[1] == pytest.approx(drafting.FIND_SECONDS * 400, rel=0.01)  # tokens a second


def test_what_fails_for_a_request_is_remembered_while_others_come_and_go(drafter: ServerDrafter) -> None:
    """A request that copies nothing, of which its text says otherwise, beside one that is new in every round."""
    client, rng = Client(drafter, np.tile(TEXT, 8)), np.random.default_rng(0)
    for step in range(12):
        drafter.flush()
        other = Client(drafter, tokens(1, 2, step))
        start = int(rng.integers(0, 40))
        drafter.propose([client.turn(TEXT[start : start + 4], 8), other.turn(tokens(3), 8)], computed=60)
    assert client.state.factor < 0.5


def test_a_pause_between_requests_is_not_taken_for_a_step(
    drafter: ServerDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(0.01, 0.0)
    monkeypatch.setattr(drafting, "perf_counter", clock)
    for _ in range(5):
        client = Client(drafter, TEXT)
        drafter.flush()
        for at in (0, 4):
            drafter.propose([client.turn(TEXT[at : at + 4], 0)], computed=1)
            clock.now += clock.seconds(1)
        clock.now += 60.0
    assert drafter._cost.seconds(1) == pytest.approx(0.01)
