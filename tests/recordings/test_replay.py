from __future__ import annotations

import math
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache import SuffixCache
from agentspec.cache.tokens import Tokens
from agentspec.recordings.replay import EncodedCall, accepted_nodes, replay, replay_cache
from agentspec.types import Draft


def ints(*values: int) -> Tokens:
    return np.asarray(values, dtype=np.int32)


def tree(tokens: Tokens, parents: Tokens) -> Draft:
    probabilities, zeros = np.full(len(tokens), 0.5, np.float32), np.zeros(len(tokens), np.int32)
    return Draft(tokens, parents, probabilities, zeros, zeros.astype(np.uint8))


class Oracle:
    """Knows the answer; drafts `right` tokens of it, then `wrong` others."""

    def __init__(self, call: EncodedCall, right: int, wrong: int = 0) -> None:
        self.answer, self.right, self.wrong, self.at = call.response, right, wrong, 0
        self.extended: list[Tokens] = []

    def draft(self, max_tokens: int) -> Draft:
        known = self.answer[self.at : self.at + self.right]
        path = np.concatenate((known, np.full(self.wrong, -7, dtype=np.int32)))[:max_tokens]
        return tree(path, np.arange(-1, len(path) - 1, dtype=np.int32))

    def extend(self, tokens: Tokens) -> None:
        self.extended.append(tokens)
        self.at += len(tokens)


responses = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=40), min_size=1, max_size=5)


def calls_of(answers: list[list[int]]) -> list[EncodedCall]:
    return [EncodedCall("s", ints(9, 9), ints(*answer)) for answer in answers]


@given(responses, st.integers(0, 8), st.integers(0, 3), st.integers(0, 12))
def test_an_oracle_gives_the_known_number_of_steps(answers, right, wrong, budget) -> None:
    opened = list[Oracle]()

    def open_request(call: EncodedCall) -> nullcontext[Oracle]:
        opened.append(Oracle(call, right, wrong))
        return nullcontext(opened[-1])

    result = replay(calls_of(answers), open_request, budget)
    per_step = min(right, budget) + 1
    assert result.tokens == [len(answer) for answer in answers]
    assert result.steps == [math.ceil(len(answer) / per_step) for answer in answers]
    assert [np.concatenate(oracle.extended).tolist() for oracle in opened] == answers


@given(responses, st.integers(0, 40))
def test_the_cache_is_fed_every_response_token_once(answers, budget) -> None:
    with SuffixCache.open() as cache:
        result = replay(calls_of(answers), lambda call: cache.request(call.prompt), budget)
        stats = cache.stats()
    assert result.tokens == [len(answer) for answer in answers]
    assert stats.tokens == sum(result.tokens)
    assert (stats.steps, stats.drafted) == (sum(result.steps), sum(result.drafted))
    assert all(drafted <= budget * steps for drafted, steps in zip(result.drafted, result.steps, strict=True))
    # Every step takes the accepted tokens and one more, save where the response ends with an accepted one.
    accepted = sum(int(nodes.sum()) for nodes in result.accepted)
    assert 0 <= accepted + sum(result.steps) - sum(result.tokens) <= len(answers)
    assert accepted - stats.accepted == 0


def test_acceptance_follows_one_path_of_the_tree() -> None:
    #     1 -> 2 -> 3        a second child of the root, and one of node 1
    #     4    5
    drafted = tree(ints(1, 4, 2, 5, 3), ints(-1, -1, 0, 0, 2))
    assert accepted_nodes(drafted, ints(1, 2, 3, 9)).tolist() == [True, False, True, False, True]
    assert accepted_nodes(drafted, ints(1, 5, 3)).tolist() == [True, False, False, True, False]
    assert accepted_nodes(drafted, ints(4)).tolist() == [False, True, False, False, False]
    assert accepted_nodes(drafted, ints(1, 2)).tolist() == [True, False, True, False, False]
    assert not accepted_nodes(drafted, ints(7)).any()


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=25))
def test_the_savings_of_a_log(answers: list[list[int]]) -> None:
    replayed = replay_cache(calls_of(answers), 8)
    steps = sum(replayed.steps)
    assert sum(replayed.tokens) == sum(map(len, answers)) >= steps
    assert replayed.saved == pytest.approx(1 - 1 / replayed.tokens_per_step)
    assert replayed.hit_rate * steps == pytest.approx(sum(bool(nodes.any()) for nodes in replayed.accepted))
