"""Learns by labels which step of a workflow follows which, and with what tokens the prompts of each step begin."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from time import time
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.torch.engine.prefix_cache import common_prefix
from agentspec.backends.torch.engine.request import EngineRequest
from agentspec.cache.deletion import Reach

MOST_STEPS = 256  # that are remembered, and as many sessions
LONGEST = 4096  # tokens of a prompt that are remembered
LEAST_SHARE = 0.3  # of a step's successors, from which one is expected
MOST_COUNTS = 64  # of successors, after which all counts are halved: steps with ever new names are forgotten

Key = tuple[str, str | None, str]  # tenant, workflow, and a step or a session
V = TypeVar("V")
ShortTokens = NDArray[np.int32]


@dataclass(slots=True)
class StepRecord:
    """The last prompt of a step with its session, what prompts of two sessions had in common, and the next steps."""

    session: str | None = None
    tokens: ShortTokens = field(default_factory=lambda: np.empty(0, np.int32))
    shared: ShortTokens = field(default_factory=lambda: np.empty(0, np.int32))
    followers: Counter[Key] = field(default_factory=Counter)
    began: float = field(default_factory=time)

    def saw(self, session: str | None, prompt: list[int]) -> None:
        tokens = np.asarray(prompt[:LONGEST], dtype=np.int32)
        if session != self.session and len(self.tokens):
            self.shared = tokens[: common_prefix(self.tokens, tokens)]
        self.session, self.tokens = session, tokens

    def was_followed_by(self, step: Key) -> None:
        self.followers[step] += 1
        if self.followers.total() > MOST_COUNTS:
            self.followers = Counter({other: count // 2 for other, count in self.followers.items() if count > 1})


class StepPrompts:
    """What was learned of the requests with a session and a step among their labels. Only one thread may use it."""

    def __init__(self) -> None:
        self._steps: OrderedDict[Key, StepRecord] = OrderedDict()
        self._places: OrderedDict[Key, Key] = OrderedDict()

    def ended(self, request: EngineRequest) -> list[int]:
        """Learn from a request that has been answered. Returns the tokens with which the prompt of the step that is
        likely to be next begins; empty if none is known.
        """
        labels = request.original.labels
        if labels.session is None or labels.step is None or not request.original.store:
            return []
        place, step = (request.tenant, labels.workflow, labels.session), (request.tenant, labels.workflow, labels.step)
        before = self._places.get(place)
        if before not in (None, step) and before in self._steps:  # a step that follows itself finds its own slots
            self._steps[before].was_followed_by(step)
        _put(self._places, place, step)
        record = self._steps.get(step) or StepRecord()
        _put(self._steps, step, record)
        record.saw(labels.session, request.prompt)
        return self._next(record)

    def forget(self, reach: Reach) -> None:
        """Forget all steps of the tenants that a deletion concerns: what sessions had in common is not told apart."""

        def left(tenant: str, began: float) -> bool:
            before = reach.scope.before
            return not reach.concerns(tenant) or (before is not None and began >= before)

        kept = {key: record for key, record in self._steps.items() if left(key[0], record.began)}
        self._steps = OrderedDict(kept)
        self._places = OrderedDict((place, step) for place, step in self._places.items() if step in kept)
        for record in kept.values():
            record.followers = Counter({step: seen for step, seen in record.followers.items() if step in kept})

    def _next(self, record: StepRecord) -> list[int]:
        for follower, count in record.followers.most_common(1):
            if count >= LEAST_SHARE * record.followers.total() and follower in self._steps:
                return [int(token) for token in self._steps[follower].shared]
        return []


def _put(kept: OrderedDict[Key, V], key: Key, value: V) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MOST_STEPS:
        kept.popitem(last=False)
