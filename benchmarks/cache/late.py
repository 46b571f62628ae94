"""What it costs to know an output late, as the host of vLLM's second model runner does: tokens per step, by replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from agentspec.backends.vllm.runner_v2 import matching
from agentspec.backends.vllm.runner_v2.passages import likeliest_paths, passages, shape_for
from agentspec.cache import SuffixCache
from agentspec.cache.index import DEPTH
from agentspec.cache.request import CacheRequest
from agentspec.cache.tokens import Tokens
from agentspec.recordings.traces import EncodedCall

STEPS = (1, 2)


@dataclass(frozen=True, slots=True)
class LateFigures:
    """Tokens per step with chains of `tokens` drafted tokens: in time, and by the steps that the host is behind."""

    tokens: int
    in_time: float
    late: dict[int, float]

    def loss(self, steps: int) -> float:
        """The share of the tokens per step that is lost."""
        return 1.0 - self.late[steps] / self.in_time


def measure_late(calls: Sequence[EncodedCall], tokens: int) -> LateFigures:
    """Replay `calls` over caches that are empty at first: in time, and so many steps late."""
    late = {steps: _tokens_per_step(calls, partial(_Late, tokens, steps)) for steps in STEPS}
    return LateFigures(tokens, _tokens_per_step(calls, partial(_InTime, tokens)), late)


class _Drafting(Protocol):
    """Drafts for one call; `text` is all that is there, prompt and output."""

    def draft(self, text: Tokens) -> list[int]: ...
    def extend(self, fresh: Tokens) -> None: ...
    def end(self) -> None: ...


def _tokens_per_step(calls: Sequence[EncodedCall], open_drafting: Callable[[CacheRequest, Tokens], _Drafting]) -> float:
    tokens = steps = 0
    with SuffixCache.open() as cache:
        for call in calls:
            with cache.request(call.prompt, session=call.session) as request:
                tokens += len(call.response)
                steps += _steps(call, open_drafting(request, call.prompt))
    return tokens / steps


def _steps(call: EncodedCall, drafting: _Drafting) -> int:
    """The steps that an answer takes."""
    text, at, steps = np.concatenate((call.prompt, call.response)), len(call.prompt), 0
    while at < len(text):
        drafted = drafting.draft(text[:at])
        equal = text[at : at + len(drafted)] == drafted[: len(text) - at]
        accepted = len(equal) if equal.all() else int(equal.argmin())
        drafting.extend(text[at : at + accepted + 1])
        at, steps = at + accepted + 1, steps + 1
    drafting.end()
    return steps


class _InTime:
    """Drafts the likeliest chain from all of the output."""

    def __init__(self, tokens: int, request: CacheRequest, prompt: Tokens) -> None:
        self._request, self._tokens = request, tokens

    def draft(self, text: Tokens) -> list[int]:
        found: list[int] = self._request.draft(self._tokens, chain=True).tokens.tolist()
        return found

    def extend(self, fresh: Tokens) -> None:
        self._request.extend(fresh)

    def end(self) -> None:
        """Does nothing: everything was recorded."""


class _Late:
    """Retrieves passages by the output of `steps` steps ago, and matches all of it with them."""

    def __init__(self, tokens: int, steps: int, request: CacheRequest, prompt: Tokens) -> None:
        self._request, self._tokens, self._steps = request, tokens, steps
        self._shape = shape_for(tokens)
        self._context = prompt[-DEPTH:]
        self._unknown: deque[Tokens] = deque()

    def draft(self, text: Tokens) -> list[int]:
        paths = likeliest_paths(self._request.draft(self._shape.nodes), self._shape.rows)
        rows = torch.from_numpy(passages(paths, self._context, self._shape))[None]
        own, length = torch.from_numpy(text)[None], torch.tensor([len(text)])
        found: list[int] = matching.draft(own, length, rows, self._shape.overlap, self._tokens)[0][0].tolist()
        return found

    def extend(self, fresh: Tokens) -> None:
        self._unknown.append(fresh)
        while len(self._unknown) > self._steps:
            self._learn(self._unknown.popleft())

    def end(self) -> None:
        while self._unknown:
            self._learn(self._unknown.popleft())

    def _learn(self, fresh: Tokens) -> None:
        self._request.extend(fresh)
        self._context = np.concatenate((self._context, fresh))[-DEPTH:]
