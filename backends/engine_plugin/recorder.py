"""Records a server's outputs in the cache. A thread of its own does this, so that the server's thread never waits.

A slow disk or a lost database delays only this thread or the cache's own threads.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from agentspec.backends.engine_plugin.request_state import Ending, RequestInfo, RequestState
from agentspec.backends.engine_plugin.rounds import FailureLog, metric
from agentspec.cache import CacheRequest
from agentspec.cache.tokens import Tokens

WAITING_TOKENS = 8 << 20  # tokens that may wait to be recorded: some seconds of traffic, even with long prompts
PATIENCE = 0.0004  # seconds that the searches of a round have together
CLOSE_SECONDS = 30.0  # that a cache which hangs may hold up the end of the server

logger = logging.getLogger(__name__)

Open = Callable[[RequestState, Tokens], CacheRequest]
_Asked = tuple[Callable[..., None], tuple[object, ...], int]


class OutputUpdate(NamedTuple):
    """The new tokens of an output, and how many tokens of its last draft, and from where, were drafted and accepted."""

    state: RequestState
    tokens: Tokens
    drafted: int
    accepted: int
    source: str


class CacheRecorder:
    """Carries out the calls of `begin`, `extend` and `end` in order, in its thread.

    `open_cache` opens the cache of a request from its prompt. A request whose cache fails goes on without a cache; a
    warning says so once.
    """

    def __init__(self, open_cache: Open) -> None:
        self._open = open_cache
        self._queue: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._held: list[_Asked] = []
        self._holds = False
        self._waiting = 0
        self._begun: dict[RequestState, None] = {}  # with a cache that is open
        self._groups: dict[tuple[object, ...], list[RequestState]] = {}
        self._lock = threading.Lock()
        self._failures = FailureLog(logger, "a request goes on without the token cache")
        self._thread = threading.Thread(target=self._work, name="agentspec-recorder", daemon=True)
        self._thread.start()

    def begin(self, state: RequestState, prompt: Tokens) -> None:
        """Open the request's cache. The request gets no cache if too many tokens are waiting already."""
        if self._waiting + len(prompt) > WAITING_TOKENS:
            state.recorded = False
            metric("dropped_requests").inc()
            return
        self._put(self._begin, state, prompt, tokens=len(prompt), at_once=True)

    def extend(self, updates: Sequence[OutputUpdate]) -> None:
        """Record the new tokens of all outputs in a round."""
        if wanted := [update for update in updates if update.state.recorded]:
            self._put(self._extend, wanted, tokens=sum(len(update.tokens) for update in wanted))

    def end(self, state: RequestState, ending: Ending) -> None:
        """Close the request's cache. What was aborted is not stored, and only a stop token says how outputs end."""
        self._put(self._end, state, ending)

    def run(self, act: Callable[[], None]) -> None:
        """Do something else that would hold the server's thread up."""
        self._put(act)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hand over at the end what is asked within, but beginnings: the thread would compete with a search for the
        interpreter.
        """
        self._holds = True
        try:
            yield
        finally:
            self._release()

    def flush(self, timeout: float) -> bool:
        """Wait until all calls so far are carried out; false if that took longer than `timeout` seconds."""
        self._release()
        done = threading.Event()
        self._put(done.set)
        return done.wait(timeout)

    def close(self, finish: Callable[[bool], None]) -> None:
        """Carry out all calls so far, keep the outputs that are whole though the server did not come to end them, and
        `finish(False)`; then stop the thread. Idempotent. If that takes longer than `CLOSE_SECONDS`, the cache hangs:
        `finish(True)` must leave it without waiting.
        """
        self._release()
        self._put(self._end_finished)
        self._put(finish, False)
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("agentspec: the last outputs were not recorded within %.0f s", CLOSE_SECONDS)
            finish(True)

    def _put(self, act: Callable[..., None], *args: object, tokens: int = 0, at_once: bool = False) -> None:
        with self._lock:
            self._waiting += tokens
            metric("queued_tokens").set(self._waiting)
        if self._holds and not at_once:
            self._held.append((act, args, tokens))
        else:
            self._queue.put((act, args, tokens))

    def _release(self) -> None:
        held, self._held, self._holds = self._held, [], False
        for asked in held:
            self._queue.put(asked)

    def _work(self) -> None:
        while (asked := self._queue.get()) is not None:
            self._do(*asked)
        while not self._queue.empty():
            if asked := self._queue.get():
                self._do(*asked)

    def _do(self, act: Callable[..., None], args: tuple[object, ...], tokens: int) -> None:
        with self._failures.caught():
            act(*args)
        with self._lock:
            self._waiting -= tokens
            metric("queued_tokens").set(self._waiting)

    def _begin(self, state: RequestState, prompt: Tokens) -> None:
        with self._failures.caught():
            state.cache, self._begun[state] = self._open(state, prompt), None
            if key := _group(state.request, prompt):
                state.group_key, state.group = key, self._groups.setdefault(key, [])
                state.group.append(state)

    def _extend(self, updates: Sequence[OutputUpdate]) -> None:
        counts: Counter[tuple[str, str, str]] = Counter()
        for state, tokens, drafted, accepted, source in updates:
            counts["draft_tokens", source, state.tenant] += drafted
            counts["accepted_tokens", source, state.tenant] += accepted
            cache = state.cache
            if cache is None:
                continue
            try:
                if drafted:
                    cache.count_draft(drafted, accepted)
                cache.extend(tokens)
            except Exception as error:
                self._failures.report(error)
                self._end(state, Ending.ABORTED)
        for (name, *labels), count in counts.items():
            metric(name, *labels).inc(count)

    def _end_finished(self) -> None:
        for state in [state for state in self._begun if state.finished]:
            self._end(state, state.ending)

    def _end(self, state: RequestState, ending: Ending) -> None:
        self._begun.pop(state, None)
        if state in state.group:
            state.group.remove(state)
            if not state.group:
                del self._groups[state.group_key]
        cache, state.cache = state.cache, None
        if cache is not None:
            with self._failures.caught():
                cache.abandon() if ending is Ending.ABORTED else cache.close(ended=ending is Ending.STOPPED)


def _group(request: RequestInfo, prompt: Tokens) -> tuple[object, ...]:
    """What the requests of a group have in common, without a name for it their prompt; empty for one without a group.

    No other tenant's are among them.
    """
    common = request.group or (request.store and request.share and prompt.tobytes())
    return (request.salt, request.adapter, common) if common else ()


class RecordingDrafter:
    """What the drafters of all engines share. One thread calls the methods, except `flush` and `close`.

    No method raises: a failure costs only drafts. No method but `flush` and `close` waits for a database, for the
    recording of an output or for evictions.
    """

    def __init__(
        self, open_cache: Open, vocabulary: int, *, on_close: Callable[[bool], None] = lambda hung: None
    ) -> None:
        """`open_cache` decides where each request's output is kept; `on_close` is `finish` of `CacheRecorder.close`."""
        self._recorder = CacheRecorder(open_cache)
        self._vocabulary = vocabulary
        self._on_close = on_close
        self._failures = FailureLog(logger, "a round went without drafts")

    def begin_state(self, prompt: Tokens, info: RequestInfo) -> RequestState:
        """Start drafting for a new request."""
        state = RequestState(len(prompt), info)
        self._recorder.begin(state, prompt)
        return state

    def recorded_later(self) -> AbstractContextManager[None]:
        """What is asked to be recorded within is recorded at the end."""
        return self._recorder.held()

    def flush(self, timeout: float = 10.0) -> bool:
        return self._recorder.flush(timeout)

    def close(self) -> None:
        """Record everything so far, then stop. Idempotent."""
        self._recorder.close(self._on_close)
