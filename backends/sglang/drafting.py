"""Draft trees for all requests of a server, once per step (a round). Independent of SGLang's classes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import NamedTuple

from agentspec.backends.engine_plugin.failure_log import FailureLog
from agentspec.backends.engine_plugin.recorder import CacheRecorder, Open, OutputUpdate, wait_ready
from agentspec.backends.engine_plugin.request_state import Ending, RequestInfo, RequestState
from agentspec.backends.engine_plugin.round_search import RoundSearch
from agentspec.backends.engine_plugin.round_stats import RoundStats
from agentspec.backends.sglang.tree_layout import EMPTY_TREE, TokenTree, chain, within
from agentspec.cache.index import DraftJob, Sourced
from agentspec.cache.tokens import EMPTY, Tokens
from agentspec.speculation.governor import RequestStats
from agentspec.types import path_length

PATIENCE = 0.0004  # seconds that a round waits at most for new requests' caches, and again for the indexes' locks

logger = logging.getLogger(__name__)


class TreeRequest:
    """A request, with the tree that was drafted for it last."""

    __slots__ = ("state", "tree")

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self.tree = EMPTY_TREE


class TreeTurn(NamedTuple):
    """A request's part in a round: its last tokens `context`, and those of them that are new since its last round."""

    request: TreeRequest
    fresh: list[int]
    context: Tokens


class TreeDrafter:
    """Drafts token trees for the requests of a server. One thread calls its methods, except `flush` and `close`.

    No method raises: a failure costs only drafts. No method but `flush` and `close` waits for the recording of outputs.
    """

    def __init__(
        self, open_cache: Open, vocabulary: int, *, shared: Sequence[Sourced] = (), on_close: Callable[[], None]
    ) -> None:
        """`shared` are indexes that every request is drafted from beside its own."""
        self._recorder = CacheRecorder(open_cache)
        self._vocabulary = vocabulary
        self._shared = shared
        self._on_close = on_close
        self._failures = FailureLog(logger, "a round went without drafts")
        self._stats = RoundStats()
        self._rounds = RoundSearch(self._stats)

    def begin(self, prompt: Tokens, info: RequestInfo) -> TreeRequest:
        """Start drafting for a new request. `open_cache` decides where its output is kept."""
        request = TreeRequest(RequestState(len(prompt), RequestStats(), info))
        self._recorder.begin(request.state, prompt)
        return request

    def record(self, request: TreeRequest, tokens: Tokens) -> None:
        """Record further tokens of the request's output, which are final."""
        self._recorder.extend([OutputUpdate(request.state, tokens, 0, 0)])

    def end(self, request: TreeRequest, ending: Ending) -> None:
        """End a request, and keep its output unless that was aborted."""
        self._recorder.end(request.state, ending)

    def recorded_later(self) -> AbstractContextManager[None]:
        """What is asked to be recorded within is recorded at the end."""
        return self._recorder.held()

    def flush(self, timeout: float = 10.0) -> bool:
        return self._recorder.flush(timeout)

    def close(self) -> None:
        """Record everything so far, then stop. Idempotent."""
        self._recorder.close()
        self._on_close()

    def draft(self, turns: Sequence[TreeTurn], nodes: int) -> list[TokenTree]:
        """A tree of at most `nodes` nodes for each request. SGLang verifies that many in any case."""
        started = perf_counter()
        try:
            self._learn(turns)
            wait_ready([turn.request.state for turn in turns if not turn.request.state.ready.is_set()], PATIENCE)
            trees = self._search(turns, nodes)
        except Exception as error:
            self._failures.report(error)
            trees = [EMPTY_TREE for _ in turns]
        for turn, tree in zip(turns, trees, strict=True):
            turn.request.tree = tree
        self._stats.add(perf_counter() - started, sum(len(tree.tokens) for tree in trees))
        return trees

    def _learn(self, turns: Sequence[TreeTurn]) -> None:
        """Count what became of the last trees, and follow the text in what clients predicted."""
        updates: list[OutputUpdate] = []
        for request, fresh, _ in turns:
            if request.state.predicted is not None:
                request.state.predicted.follow(fresh)
            if drafted := len(request.tree.tokens):
                right = path_length(*request.tree, fresh)
                self._stats.accepted += right
                updates.append(OutputUpdate(request.state, EMPTY, drafted, right))
        self._recorder.extend(updates)

    def _search(self, turns: Sequence[TreeTurn], nodes: int) -> list[TokenTree]:
        trees = [chain(turn.request.state.from_prediction(nodes)) for turn in turns]
        jobs = [None if tree.tokens else self._job(turn, nodes) for turn, tree in zip(turns, trees, strict=True)]
        for row, draft in enumerate(self._rounds.search(jobs, PATIENCE)):
            if draft is not None:
                trees[row] = TokenTree(draft.tokens.tolist(), draft.parents.tolist())
        return [within(tree, self._vocabulary) for tree in trees]

    def _job(self, turn: TreeTurn, nodes: int) -> DraftJob | None:
        """The search for a request; None if its cache is not open, or no drafts are made for it."""
        state = turn.request.state
        cache = state.cache  # the recorder may take it away meanwhile
        if cache is None or not state.drafts:
            return None
        return cache.drafter, [*cache.indexes, *self._shared], turn.context, nodes, 0.0, False
