"""Drafts for all requests of a server, once per engine step (a round). Independent of vLLM's classes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

from agentspec.backends.engine_plugin.recorder import CacheRecorder, Open, OutputUpdate, wait_ready
from agentspec.backends.engine_plugin.request_state import NOTHING, Continuation, RequestInfo, RequestState
from agentspec.backends.engine_plugin.round_stats import RoundStats
from agentspec.backends.vllm.step_cost import StepTimeModel
from agentspec.cache.index import DraftJob, propose_batch
from agentspec.cache.tokens import Tokens
from agentspec.speculation.governor import RequestStats, allocate_budget
from agentspec.telemetry.safe_errors import safe_message

ANY = RequestInfo()
PATIENCE = 0.0004  # seconds that a round waits at most for new requests' caches, and again for the indexes' locks
FREE = 0.005  # drafting time up to this share of a step is not counted as cost

logger = logging.getLogger(__name__)


class DraftTurn(NamedTuple):
    """A request's part in a round: its new tokens `fresh`, its last tokens `context`, and the draft's length limit.

    `context` is int32; only its last `DEPTH` tokens matter, and it is read during the call only.
    """

    state: RequestState
    fresh: Tokens
    context: Tokens
    limit: int


class ServerDrafter:
    """Drafts chains of tokens for the requests of a server. One thread calls `begin`, `propose` and `end`.

    No method raises: a failure costs only drafts. No method but `close` and `flush` waits for a database, for the
    recording of an output or for evictions.
    """

    def __init__(
        self,
        open_cache: Open,
        vocab_size: int,
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._recorder = CacheRecorder(open_cache)
        self._on_close = on_close
        self._cost = StepTimeModel()
        self._vocab_size = vocab_size
        self._last: list[RequestState] = []  # the requests of the last round
        self._last_end = 0.0
        self._failed = False
        self.stats = RoundStats()

    def begin(self, prompt: Tokens, request: RequestInfo = ANY) -> RequestState:
        """Start drafting for a new request. `open_cache` decides where its output is kept."""
        state = RequestState(len(prompt), RequestStats(), request)
        self._recorder.begin(state, prompt)
        return state

    def record(self, state: RequestState, fresh: Tokens) -> None:
        """Record new output tokens of a request for which no draft is needed."""
        self._recorder.extend([self._update(state, fresh)])

    def end(self, state: RequestState) -> None:
        """End a request and record its output."""
        self._recorder.end(state)

    def close(self) -> None:
        """Record all outputs so far, then stop. Idempotent."""
        self._recorder.close()
        self._on_close()

    def flush(self, timeout: float = 10.0) -> bool:
        return self._recorder.flush(timeout)

    def propose(self, turns: Sequence[DraftTurn], *, steady: bool = True) -> list[list[int]]:
        """A draft chain for each request. `steady` is false if the last step also did other work, such as prefill."""
        started = perf_counter()
        updates: list[OutputUpdate] = []
        try:
            updates = self._learn(turns, started if steady else None)
            chains = self._draft(turns)
        except Exception as error:
            self._report(error)
            chains = [[] for _ in turns]
        self._recorder.extend(updates)  # last: the recorder's thread would compete with drafting for the interpreter
        self._last, self._last_end = [turn.state for turn in turns], perf_counter()
        self.stats.add(self._last_end - started, sum(map(len, chains)))
        return chains

    def _learn(self, turns: Sequence[DraftTurn], now: float | None) -> list[OutputUpdate]:
        updates = [self._update(turn.state, turn.fresh) for turn in turns]
        # If requests came or went, the time since the last round is not the cost of that round's tokens.
        if now is not None and self._last and self._last == [turn.state for turn in turns]:
            self._judge(turns, now - self._last_end)
        return updates

    def _update(self, state: RequestState, fresh: Tokens) -> OutputUpdate:
        tokens = state.advance(fresh)
        self.stats.accepted += state.accepted
        return OutputUpdate(state, tokens, len(state.chain), state.accepted)

    def _judge(self, turns: Sequence[DraftTurn], seconds: float) -> None:
        """Learn from the last step what a step costs, and for each request whether searching for drafts pays.

        `allocate_budget` accounts for the cost of verifying rejected drafts, by the request's factor: a request whose
        drafts fail now may copy a page next.
        """
        asked = [state for state in self._last if state.asked]
        self._cost.observe(len(turns) + sum(len(state.chain) for state in asked), seconds)
        token = seconds / max(1, sum(len(turn.fresh) for turn in turns))
        cost = max(0.0, self.stats.last_seconds - FREE * seconds) / max(1, len(asked))
        for state in asked:
            accepted = state.accepted
            state.stats.observe(state.expected, accepted, cost, accepted * token)

    def _draft(self, turns: Sequence[DraftTurn]) -> list[list[int]]:
        wait_ready([turn.state for turn in turns if not turn.state.ready.is_set()], PATIENCE)
        self._search(turns)
        chances = [turn.state.acceptance(turn.limit) for turn in turns]
        counts = allocate_budget(chances, len(turns), lambda drafted: self._cost.many(len(turns) + drafted))
        return [
            turn.state.propose(count, sum(chance[:count]))
            for turn, chance, count in zip(turns, chances, counts, strict=True)
        ]

    def _search(self, turns: Sequence[DraftTurn]) -> None:
        """Search the cache for the requests whose continuation from the last round is too short or too unlikely."""
        floor = self._cost.least_acceptance(len(turns))
        asked = [(turn.state, job) for turn in turns if (job := self._job(turn, floor))]
        drafts = propose_batch([job for _, job in asked], PATIENCE) if asked else []
        for (state, _), draft in zip(asked, drafts, strict=True):
            state.continuation = self._legal(Continuation(draft.tokens.tolist(), draft.probabilities.tolist()))

    def _job(self, turn: DraftTurn, floor: float) -> DraftJob | None:
        """The search for a request; None if it must not draft now or needs no search, as with a prediction."""
        state, cache = turn.state, turn.state.cache
        predicted = state.from_prediction(turn.limit)
        nothing = cache is None and not predicted.tokens
        if nothing or state.finished or turn.limit <= 0 or not state.stats.ask():
            state.asked, state.continuation = False, NOTHING
            return None
        state.asked = True
        if predicted.tokens:
            state.continuation = self._legal(predicted)
            return None
        if cache is None or state.is_certain():
            return None
        return cache.drafter, cache.indexes, turn.context, turn.limit, floor, True

    def _legal(self, found: Continuation) -> Continuation:
        """The continuation up to the first token that is not in the model's vocabulary."""
        if max(found.tokens, default=0) < self._vocab_size:
            return found
        count = next(i for i, token in enumerate(found.tokens) if token >= self._vocab_size)
        return Continuation(found.tokens[:count], found.acceptance[:count])

    def _report(self, error: Exception) -> None:
        if not self._failed:
            logger.warning("agentspec: a round went without drafts: %s", safe_message(error))
        self._failed = True
