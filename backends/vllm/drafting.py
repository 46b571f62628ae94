"""Drafts for all requests of a server, once per engine step (a round). Independent of vLLM's classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter
from typing import NamedTuple

import numpy as np

from agentspec.backends.engine_plugin.recorder import PATIENCE, Open, OutputUpdate, RecordingDrafter, wait_ready
from agentspec.backends.engine_plugin.request_state import RequestInfo, RequestState
from agentspec.backends.engine_plugin.rounds import SearchOrder
from agentspec.backends.vllm.padding import ChainPadding
from agentspec.backends.vllm.step_cost import LIKELY, StepTimeModel, TrialSteps
from agentspec.cache.index import ChainTurn, StepCurve, propose_chains
from agentspec.cache.tokens import Tokens

ANY = RequestInfo()
FREE_STEP = StepCurve(np.array([1.0]), np.array([1.0]))  # in which every token of a chain pays
FIND_SECONDS = 2e-6  # what a search takes for each token that it finds: 1.2 to 2.3 us measured, by the cache's size
RATE = 0.1  # how fast the server's tokens a second are followed
LARGE = 512  # tokens of a step
FREE = 0.005  # drafting time up to this share of a step is not counted as cost


class DraftTurn(NamedTuple):
    """A request's part in a round: its new tokens `fresh`, its last tokens `context`, and the draft's length limit.

    `context` is int32; only its last `DEPTH` tokens matter, and it is read during the call only.
    """

    state: RequestState
    fresh: Tokens
    context: Tokens
    limit: int


class ServerDrafter(RecordingDrafter):
    """Drafts chains of tokens for the requests of a server."""

    def __init__(
        self,
        open_cache: Open,
        vocab_size: int,
        *,
        on_close: Callable[[bool], None] = lambda hung: None,
        padding: Callable[[], ChainPadding | None] = lambda: None,
    ) -> None:
        """`padding` is asked once, in the first round."""
        super().__init__(open_cache, vocab_size, on_close=on_close)
        self._later: list[Callable[[], None]] = []  # what the recorder's thread learns after this round
        self._cost = StepTimeModel(self._later.append)
        self._trials = TrialSteps()
        self._order = SearchOrder()
        self._padding = cache(padding)
        self._padded = False  # the last round's chains were filled
        self._gained, self._seconds = 0.0, 1.0  # tokens and seconds of recent steps, later ones counting more
        self._last: list[RequestState] = []  # the requests of the last round
        self._last_end = 0.0

    def begin(self, prompt: Tokens, request: RequestInfo = ANY) -> RequestState:
        return self.begin_state(prompt, request)

    def record(self, state: RequestState, fresh: Tokens) -> None:
        """Record new output tokens of a request for which no draft is needed."""
        self._recorder.extend([self._update(state, fresh)])

    def end(self, state: RequestState) -> None:
        """End a request and record its output, as it ended."""
        self._recorder.end(state, state.ending)

    def propose(self, turns: Sequence[DraftTurn], *, computed: int | None = None) -> list[list[int]]:
        """A draft chain for each request. `computed` is the number of tokens of the last step, those of prompts too;
        without it, a step is learned from only if the requests are those of the round before.
        """
        started = perf_counter()
        updates: list[OutputUpdate] = []
        try:
            updates = [self._update(turn.state, turn.fresh) for turn in turns]
            self._learn(turns, started, computed)
            chains = self._draft(turns, started)
        except Exception as error:
            self._failures.report(error)
            chains = [[] for _ in turns]
        self._recorder.extend(updates)  # last, as in `CacheRecorder.held`
        for learn in self._later:
            self._recorder.run(learn)
        self._later.clear()
        self._last, self._last_end = [turn.state for turn in turns], perf_counter()
        self.stats.add(self._last_end - started, [len(chain) for chain in chains])
        return chains

    def _learn(self, turns: Sequence[DraftTurn], now: float, computed: int | None) -> None:
        """Learn from the step that ended `now`."""
        states = [turn.state for turn in turns]
        same = states == self._last
        if computed is None and same:
            computed = len(turns) + sum(state.chain.drafted for state in states if state.asked)
        # Only while a request goes on is the time since the last round that of one step.
        kept = states if same else list(set(self._last).intersection(states))
        if computed and kept:
            seconds = now - self._last_end
            self._learn_cost(states, computed, seconds, same=same)
            gained = sum(len(turn.fresh) for turn in turns)
            self._judge(kept, seconds, gained)
            self._gained += RATE * (gained - self._gained)
            self._seconds += RATE * (seconds - self._seconds)

    def _update(self, state: RequestState, fresh: Tokens) -> OutputUpdate:
        tokens = state.advance(fresh)
        accepted = state.chain.accepted
        self.stats.accepted += accepted
        return OutputUpdate(state, tokens, state.chain.drafted, accepted)

    def _learn_cost(self, states: Sequence[RequestState], computed: int, seconds: float, *, same: bool) -> None:
        """Large steps that read prompts tell little of those that verify drafts."""
        padding, requests = self._padding(), len(states)
        if padding and self._padded:
            if same and padding.holds(requests, computed):
                padding.observe(requests, seconds)
        elif computed <= LARGE or computed <= requests + sum(state.chain.drafted for state in states):
            self._trials.measured(self._cost.seconds(computed), seconds)
            self._cost.observe(computed, seconds)

    def _judge(self, states: Sequence[RequestState], seconds: float, gained: int) -> None:
        """Learn for each request whether searching for drafts pays, from a step that gained so many tokens.

        `propose_chains` accounts for the cost of verifying rejected drafts, by the request's factor: a request whose
        drafts fail now may copy a page next.
        """
        asked = [state for state in states if state.asked]
        cost = max(0.0, self.stats.last_seconds - FREE * seconds) / max(1, len(asked))
        for state in asked:
            chain = state.chain
            state.stats.observe(chain.expected, chain.accepted, cost, chain.accepted * seconds / max(1, gained))

    def _draft(self, turns: Sequence[DraftTurn], now: float) -> list[list[int]]:
        wait_ready([turn.state for turn in turns if not turn.state.ready.is_set()], PATIENCE)
        rows = self._order.rows(len(turns))
        chains = dict(zip(rows, self._chains([turns[row] for row in rows], now), strict=True))
        asked = [row for row in rows if turns[row].state.asked]
        self._order.reached(asked, [turns[row].state.chain.is_certain(1, 0.0) for row in asked])
        return [chains[row] for row in range(len(turns))]

    def _chains(self, turns: Sequence[DraftTurn], now: float) -> list[list[int]]:
        step = self._cost.seconds(len(turns))  # without drafts
        parts = [self._chain_turn(turn, turn.state.required_tokens(now, step)) for turn in turns]
        curve, floor = self._curve(parts)
        chains = propose_chains(parts, curve, floor=floor, vocabulary=self._vocabulary, patience=PATIENCE)
        return self._fill(turns, parts, chains)

    def _curve(self, parts: Sequence[ChainTurn]) -> tuple[StepCurve, float]:
        """The seconds of this round's step, and the probability below which no token pays: neither for its part of the
        step nor for the time of finding it, in which the whole server gains nothing.

        Nothing is tried where chains are filled, which has trials of its own, or where a request has a latency goal.
        """
        floor = self._cost.least_acceptance(len(parts)) + FIND_SECONDS * self._gained / self._seconds
        free = self._padding() is None and all(part.required <= 1.0 for part in parts)
        return (FREE_STEP, min(floor, LIKELY)) if free and self._trials.begin() else (self._cost.curve, floor)

    def _fill(self, turns: Sequence[DraftTurn], parts: list[ChainTurn], chains: list[list[int]]) -> list[list[int]]:
        """The chains at full length, where that pays."""
        padding, requests = self._padding(), len(turns)
        self._padded = False
        if padding is None or not padding.fits([turn.limit for turn in turns]):
            return chains
        cut = requests + sum(part.chain.expected for part in parts)
        seconds = self._cost.seconds(requests + sum(map(len, chains)))
        whole = requests + sum(part.factor * sum(part.chain.acceptance[: part.limit]) for part in parts)
        if not padding.pays(requests, whole, cut, seconds):
            return chains
        self._padded = True
        chains = propose_chains([part._replace(drafter=None) for part in parts], FREE_STEP, vocabulary=self._vocabulary)
        return [padding.filled(chain, int(turn.context[-1])) for chain, turn in zip(chains, turns, strict=True)]

    def _chain_turn(self, turn: DraftTurn, required: float) -> ChainTurn:
        """The part in the common call of a request that must gain `required` tokens. It is searched for if its chain is
        too short or too unlikely.
        """
        state, _, context, limit = turn
        cache, predicted, factor = state.cache, state.from_prediction(limit), state.factor
        if state.lost_text():
            state.chain.clear()
        nothing = cache is None and not predicted
        if nothing or not state.drafts or limit <= 0 or not state.stats.ask():
            state.asked = False
            state.chain.clear()
            return ChainTurn(state.chain, None, (), context, 0, factor)
        state.asked = True
        state.source = "prediction" if predicted else "cache"
        if predicted:
            state.chain.replace(predicted, state.confidence(len(predicted)))
        elif cache is not None and not state.is_certain(math.ceil(min(limit, max(1.0, required - 1.0)))):
            return ChainTurn(state.chain, cache.drafter, state.indexes, context, limit, factor, required)
        return ChainTurn(state.chain, None, (), context, limit, factor, required)
