"""Recorded calls as token arrays, and their teacher-forced replay: drafts step by step, compared with what was written.

A step is one verification: the target accepts the path of the draft that agrees with the recorded text and adds one
token of its own. Tokens per step is thus the speed-up that verification alone allows, if everything else were free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentspec.cache import SuffixCache
from agentspec.cache.tokens import Tokens
from agentspec.types import Draft


@dataclass(frozen=True, slots=True)
class EncodedCall:
    """One recorded call: the tokens of the prompt, and of the response with its end of turn."""

    session: str
    prompt: Tokens
    response: Tokens


class OpenRequest(Protocol):
    """One generation in progress, such as a `CacheRequest`."""

    def draft(self, max_tokens: int) -> Draft: ...
    def extend(self, tokens: Tokens) -> None: ...


Open = Callable[[EncodedCall], AbstractContextManager[OpenRequest]]


@dataclass(slots=True)
class Replay:
    """The counts of one pass over the calls of a file. Row i of `tokens`, `steps` and `drafted` is call i.

    Seconds are processor time of the calling thread.
    """

    tokens: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    predicted: list[NDArray[np.float32]] = field(default_factory=list)  # of each step's nodes
    accepted: list[NDArray[np.bool_]] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)  # of each step
    open_seconds: list[float] = field(default_factory=list)  # of each call
    extend_seconds: float = 0.0  # of all calls
    close_seconds: float = 0.0  # of all calls

    @property
    def tokens_per_step(self) -> float:
        return sum(self.tokens) / sum(self.steps)

    @property
    def drafted_per_step(self) -> float:
        return sum(self.drafted) / sum(self.steps)

    @property
    def hit_rate(self) -> float:
        """Share of steps with at least one accepted token."""
        return sum(bool(nodes.any()) for nodes in self.accepted) / len(self.accepted)

    @property
    def saved(self) -> float:
        """Share of the model's steps that would not have been taken: without drafts each token takes one."""
        return 1 - sum(self.steps) / sum(self.tokens)


def replay(calls: Sequence[EncodedCall], open_request: Open, budget: int, result: Replay | None = None) -> Replay:
    """Replay `calls` in order with draft trees of at most `budget` tokens; counted in `result` too, if given."""
    result = Replay() if result is None else result
    for call in calls:
        start = time.thread_time()
        with open_request(call) as request:
            result.open_seconds.append(time.thread_time() - start)
            _replay_call(call.response, request, budget, result)
            start = time.thread_time()
        result.close_seconds += time.thread_time() - start
    return result


def replay_cache(calls: Sequence[EncodedCall], budget: int) -> Replay:
    """Replay `calls` with their sessions over one in-memory cache, which is empty at the start."""
    with SuffixCache.open() as cache:
        return replay(calls, lambda call: cache.request(call.prompt, session=call.session), budget)


def _replay_call(response: Tokens, request: OpenRequest, budget: int, result: Replay) -> None:
    at = steps = drafted = 0
    while at < len(response):
        start = time.thread_time()
        draft = request.draft(budget)
        _ = draft.tokens, draft.parents  # what a target reads of it: made when it is read
        drawn = time.thread_time()
        accepted = accepted_nodes(draft, response[at:])
        committed = response[at : at + int(accepted.sum()) + 1]
        begun = time.thread_time()
        request.extend(committed)
        result.extend_seconds += time.thread_time() - begun
        result.draft_seconds.append(drawn - start)
        result.predicted.append(draft.probabilities)
        result.accepted.append(accepted)
        at, steps, drafted = at + len(committed), steps + 1, drafted + len(draft.tokens)
    result.tokens.append(at)
    result.steps.append(steps)
    result.drafted.append(drafted)


def accepted_nodes(draft: Draft, actual: Tokens) -> NDArray[np.bool_]:
    """Whether each node lies on the path that spells the beginning of `actual`: at most one node per depth."""
    accepted = np.zeros(len(draft.tokens), dtype=np.bool_)
    expected = actual[: len(draft.tokens)].tolist()
    node, depth = -1, 0
    for index, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
        if depth < len(expected) and parent == node and token == expected[depth]:
            accepted[index] = True
            node, depth = index, depth + 1
    return accepted
