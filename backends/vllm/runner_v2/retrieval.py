"""The host's part: follows the outputs as they become known, records them, and retrieves passages from the cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from agentspec.backends.engine_plugin.failure_log import FailureLog
from agentspec.backends.engine_plugin.recorder import CacheRecorder, Open, OutputUpdate
from agentspec.backends.engine_plugin.request_state import RequestInfo, RequestState
from agentspec.backends.engine_plugin.round_stats import RoundStats
from agentspec.backends.vllm.runner_v2.passages import NO_TOKEN, PassageShape, Rows, likeliest_paths, passages
from agentspec.cache.index import DEPTH, DraftJob, propose_batch
from agentspec.cache.tokens import Tokens
from agentspec.speculation.governor import RequestStats

PATIENCE = 0.0004  # seconds that a round waits at most for the indexes' locks

logger = logging.getLogger(__name__)


class PassageRequest:
    """A request: its state, and the last tokens of its text as far as the host knows it."""

    __slots__ = ("context", "drafted", "preempted", "state")

    def __init__(self, state: RequestState, text: Tokens) -> None:
        self.state, self.context = state, text[-DEPTH:]
        self.drafted = False  # whether a draft came before its newest tokens
        self.preempted = False  # it ends here and begins anew, with its output so far


class PassageRetriever:
    """Retrieves passages for the requests of a server. One thread calls its methods, except `flush` and `close`.

    No method raises: a failure costs only drafts. No method but `flush` and `close` waits for the recording of outputs.
    """

    def __init__(
        self,
        open_cache: Open,
        vocabulary: int,
        shape: PassageShape,
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._recorder = CacheRecorder(open_cache)
        self._vocabulary = vocabulary
        self._shape = shape
        self._on_close = on_close
        self._failures = FailureLog(logger, "a round went without passages")
        self.stats = RoundStats()

    def begin(self, prompt: Tokens, info: RequestInfo) -> PassageRequest:
        """Follow a new request. `open_cache` decides where its output is kept."""
        request = PassageRequest(RequestState(len(prompt), RequestStats(), info), prompt)
        self._recorder.begin(request.state, prompt)
        return request

    def advance(self, outputs: Sequence[tuple[PassageRequest, Tokens]], drafted: int = 0) -> None:
        """Take in new tokens of outputs: all but the last one of each are accepted ones of `drafted` tokens."""
        updates: list[OutputUpdate] = []
        for request, fresh in outputs:
            if len(fresh):
                tokens = request.state.advance(fresh)
                request.context = np.concatenate((request.context, fresh))[-DEPTH:]
                accepted = len(fresh) - 1 if drafted else 0
                self.stats.accepted += accepted
                updates.append(OutputUpdate(request.state, tokens, drafted, accepted))
        if updates:
            self._recorder.extend(updates)

    def end(self, request: PassageRequest) -> None:
        """End a request and keep its output, unless that goes on later."""
        (self._recorder.abandon if request.preempted else self._recorder.end)(request.state)

    def retrieve(self, requests: Sequence[PassageRequest | None]) -> Rows:
        """Passages for each request, as an int32 array (requests, count, width), filled up with -1."""
        started = perf_counter()
        found = np.full((len(requests), self._shape.rows, self._shape.width), NO_TOKEN, dtype=np.int32)
        with self._failures.caught():
            self._fill(found, requests)
        self.stats.add(perf_counter() - started, int(np.count_nonzero(found[:, :, self._shape.overlap :] >= 0)))
        return found

    def flush(self, timeout: float = 10.0) -> bool:
        return self._recorder.flush(timeout)

    def close(self) -> None:
        """Record everything so far, then stop. Idempotent."""
        self._recorder.close()
        self._on_close()

    def _fill(self, found: Rows, requests: Sequence[PassageRequest | None]) -> None:
        shape = self._shape
        searched = {row: job for row, request in enumerate(requests) if (job := self._job(request))}
        trees = dict(zip(searched, propose_batch(list(searched.values()), PATIENCE), strict=True)) if searched else {}
        for row, request in enumerate(requests):
            if request is None or request.state.finished:
                continue
            paths = likeliest_paths(trees[row], shape.rows) if row in trees else []
            if predicted := request.state.from_prediction(shape.ahead):
                paths.insert(0, predicted)
            found[row] = passages([self._legal(path) for path in paths], request.context, shape)

    def _job(self, request: PassageRequest | None) -> DraftJob | None:
        """The search for a request; None if it has no cache, not yet or not any more."""
        if request is None or request.state.finished or (cache := request.state.cache) is None:
            return None
        return cache.drafter, cache.indexes, request.context, self._shape.nodes, 0.0, False

    def _legal(self, path: list[int]) -> list[int]:
        """The path up to the first token that is not in the model's vocabulary."""
        return path[: next((i for i, token in enumerate(path) if token >= self._vocabulary), len(path))]
