"""The host's part: follows the outputs as they become known, records them, and retrieves passages from the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from agentspec.backends.engine_plugin.recorder import PATIENCE, Open, OutputUpdate, RecordingDrafter
from agentspec.backends.engine_plugin.request_state import Ending, RequestInfo, RequestState
from agentspec.backends.vllm.runner_v2.passages import NO_TOKEN, PassageShape, Rows, likeliest_paths, passages
from agentspec.cache.index import DEPTH, DraftJob
from agentspec.cache.tokens import Tokens


class PassageRequest:
    """A request: its state, the last tokens of its text as far as the host knows it, and the passages found last."""

    __slots__ = ("context", "drafted", "passages", "preempted", "state")

    def __init__(self, state: RequestState, text: Tokens, passages: Rows) -> None:
        self.state, self.context, self.passages = state, text[-DEPTH:], passages
        self.drafted = False  # whether a draft came before its newest tokens
        self.preempted = False  # it ends here and begins again, with its output so far


class PassageRetriever(RecordingDrafter):
    """Retrieves passages for the requests of a server."""

    def __init__(
        self,
        open_cache: Open,
        vocabulary: int,
        shape: PassageShape,
        *,
        on_close: Callable[[bool], None] = lambda hung: None,
    ) -> None:
        super().__init__(open_cache, vocabulary, on_close=on_close)
        self._shape = shape

    def begin(self, prompt: Tokens, info: RequestInfo) -> PassageRequest:
        """Follow a new request."""
        return PassageRequest(self.begin_state(prompt, info), prompt, passages([], prompt, self._shape))

    def advance(self, outputs: Sequence[tuple[PassageRequest, Tokens]], drafted: int = 0) -> None:
        """Take in new tokens of outputs: all but the last one of each are accepted ones of `drafted` tokens, if a draft
        came before them.
        """
        updates: list[OutputUpdate] = []
        for request, fresh in outputs:
            if len(fresh):
                count = drafted if request.drafted and request.state.drafts else 0
                tokens = request.state.advance(fresh)
                request.context = np.concatenate((request.context, fresh))[-DEPTH:]
                request.drafted = True
                updates.append(OutputUpdate(request.state, tokens, count, len(fresh) - 1 if count else 0))
        if updates:
            self._recorder.extend(updates)

    def end(self, request: PassageRequest) -> None:
        """End a request and keep its output, unless that was aborted or goes on later."""
        self._recorder.end(request.state, Ending.ABORTED if request.preempted else request.state.ending)

    def retrieve(self, requests: Sequence[PassageRequest | None]) -> Rows:
        """Passages for each request, as an int32 array (requests, count, width), filled up with -1."""
        started = perf_counter()
        found = np.full((len(requests), self._shape.rows, self._shape.width), NO_TOKEN, dtype=np.int32)
        with self._failures.caught():
            self._fill(found, requests)
        drafted = np.count_nonzero(found[:, :, self._shape.overlap :] >= 0, axis=(1, 2))
        self.stats.add(perf_counter() - started, drafted.tolist())
        return found

    def _fill(self, found: Rows, requests: Sequence[PassageRequest | None]) -> None:
        shape = self._shape
        trees = self._rounds.search([self._job(request) for request in requests], PATIENCE)
        for row, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            if request is None or not request.state.drafts:
                continue
            if request.state.lost_text() and tree is None:
                request.passages = self._passages([], request)
            if tree is not None:  # else what was found before still serves, as far as the text goes on like it
                request.passages = self._passages(likeliest_paths(tree, shape.rows), request)
            found[row] = request.passages
            if predicted := request.state.from_prediction(shape.ahead):
                found[row, 1:] = request.passages[:-1]
                found[row, 0] = self._passages([predicted], request)[0]

    def _job(self, request: PassageRequest | None) -> DraftJob | None:
        """The search for a request; None if it has no cache, not yet or not any more, or wants no drafts."""
        if request is None or not request.state.drafts or (cache := request.state.cache) is None:
            return None
        return cache.drafter, request.state.indexes, request.context, self._shape.nodes, 0.0, False

    def _passages(self, paths: Sequence[list[int]], request: PassageRequest) -> Rows:
        """The paths as passages, each up to the first token that is not in the model's vocabulary."""
        most = self._vocabulary
        legal = [path[: next((i for i, token in enumerate(path) if token >= most), len(path))] for path in paths]
        return passages(legal, request.context, self._shape)
