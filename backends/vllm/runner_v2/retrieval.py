"""The host's part: follows the outputs as they become known, records them, and retrieves passages from the cache.

A thread of its own does all of this between the engine's steps, with copies from and to the device in a stream of its
own. The engine's thread hands over what the device is about to compute, and takes the passages of all rows where there
are newer ones on the device: it waits for no search, and copies nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from random import Random
from time import perf_counter
from typing import Any, NamedTuple

import torch

from agentspec.backends.engine_plugin.cache_router import close_at_exit, open_router
from agentspec.backends.engine_plugin.recorder import CLOSE_SECONDS, Open, OutputUpdate, RecordingDrafter
from agentspec.backends.engine_plugin.request_state import Deletions, Ending, RequestInfo, RequestState
from agentspec.backends.engine_plugin.rounds import metric
from agentspec.backends.engine_plugin.settings import read_settings
from agentspec.backends.vllm.proposer import ENGINE, drafts_here
from agentspec.backends.vllm.runner_v2.passages import NO_TOKEN, PassageShape
from agentspec.cache.index import PassageJob, Passages, find_passages
from agentspec.cache.tokens import EMPTY, Tokens

SEARCHED = 8 * (os.cpu_count() or 1)  # requests at once; others are searched for once the device has what these get
logger = logging.getLogger(__name__)


def open_retriever(config: Any, shape: PassageShape, place: str) -> PassageRetriever | None:
    """The retriever for a `VllmConfig`, with its cache open; None where another rank drafts. The log says that `place`.
    Raises `ConfigurationError` and `CacheError`s.
    """
    if not drafts_here(config):
        return None
    router = open_router(read_settings(ENGINE), config.model_config, place)
    retriever = PassageRetriever(router.open, config.model_config.get_vocab_size(), shape, on_close=router.close)
    close_at_exit(retriever.close)  # not the speculator's, which holds memory of the device
    return retriever


class PassageRequest:
    """A request: its state, its text as far as the host knows it, and its row on the device."""

    __slots__ = ("choice", "drafted", "preempted", "row", "state", "text")

    def __init__(self, state: RequestState, text: Passages, row: int) -> None:
        self.state, self.text, self.row = state, text, row
        self.drafted = False  # whether a draft came before its newest tokens
        self.preempted = False  # it ends here and begins again, with its output so far
        self.choice: Any = None  # what is known of its drafters, where there are several


class Found(NamedTuple):
    """Passages on the device (rows, all tokens and chances), int32, after so many deletions and ends of requests."""

    passages: torch.Tensor
    deletions: int
    ends: int


Packed = tuple[torch.Tensor, Any]  # a step's tokens on the device, and the event of a GPU that tells of their arrival


class SampledTokens:
    """The tokens of a step that the device is about to compute: row i of `packed` holds their number, then the last
    tokens of request i.

    `used` is what the device may read until then. `spare` gets what is no longer needed.
    """

    def __init__(self, packed: Packed, spare: deque[Packed], used: object) -> None:
        (self._packed, self._event), self._spare, self._used = packed, spare, used
        if self._event is not None:
            self._event.record()

    def arrived(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def take(self, requests: int, columns: int = 1) -> tuple[list[Tokens], list[list[int]]]:
        """Once they have arrived, and only once: the new tokens of so many requests, and their first `columns` columns,
        of which the first is the number of these tokens.
        """
        rows = self._packed[:requests].to("cpu", copy=True).numpy()
        self._spare.append((self._packed, self._event))
        notes = rows[:, :columns].tolist()
        return [row[len(row) - count :] for row, (count, *_) in zip(rows, notes, strict=True)], notes


_Task = tuple[SampledTokens | None, Callable[[], object]]


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
        self._tasks = deque[_Task]()
        self._told: SimpleQueue[bool] = SimpleQueue()  # of each that there is one, or that there are no more
        self._ends = 0  # of requests
        self._wanted = dict[PassageRequest, int]()  # to be searched for; the tokens that their passages have left
        self._random = Random()  # its own: others may want theirs to repeat
        self._later: list[Callable[[], object]] = []  # for the recorder: its thread would compete with the search
        self._thread = threading.Thread(target=self._work, name="agentspec-search", daemon=True)
        self._thread.start()

    def hold(self, rows: int, device: torch.device) -> Found:
        """Have the passages of so many rows on the device; returns those of none. Before any request."""
        size, on_gpu = (rows, 2 * self._shape.rows * self._shape.width), device.type == "cuda"
        self._device, self._deletions = device, Deletions.count
        self._held = torch.full(size, NO_TOKEN, dtype=torch.int32, pin_memory=on_gpu)  # what the device gets next
        self._rows = self._held.numpy()
        self.found = Found(self._held.to(device, copy=True), self._deletions, 0)  # the engine's thread may write to it
        if on_gpu:
            self.after(None, self._use_stream)
        return self.found

    def _use_stream(self) -> None:
        """Have the search's thread wait for nothing on the device but its own copies, with memory for them."""
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        self._held.to(self._device, copy=True)

    def begin(self, prompt: Tokens, info: RequestInfo, row: int, output: Tokens = EMPTY) -> PassageRequest:
        """Follow a new request, or one that goes on after `output`, which has that row on the device."""
        shape = self._shape
        text = Passages(prompt, rows=shape.rows, overlap=shape.overlap, width=shape.width)
        request = PassageRequest(self.begin_state(prompt, info), text, row)
        if len(output):
            self.after(None, partial(self._resume, request, output))
        self._recorder.run(partial(self.after, None, partial(self.want, request)))  # once its cache is open
        return request

    def after(self, tokens: SampledTokens | None, act: Callable[[], object]) -> None:
        """Have the search's thread do something once `tokens` have arrived and what it was given before is done."""
        self._tasks.append((tokens, act))
        self._told.put(True)

    def advance(self, outputs: Iterable[tuple[PassageRequest, Tokens]], drafted: int = 0) -> None:
        """Take in new tokens of outputs: all but the last one of each are accepted ones of `drafted` tokens, if a draft
        came before them. In the search's thread.
        """
        updates: list[OutputUpdate] = []
        for request, fresh in outputs:
            if not len(fresh):
                continue
            count = drafted if request.drafted and request.state.drafts else 0
            accepted = len(fresh) - 1 if count else 0
            state = request.state
            updates.append(OutputUpdate(state, state.advance(fresh), count, accepted, state.source))
            request.drafted = True
            request.text.advance(fresh)
            if (left := request.text.left) < self._shape.least:
                self.want(request, left)
        self._later.append(partial(self._recorder.extend, updates))

    def end(self, request: PassageRequest) -> None:
        """End a request and keep its output, unless that was aborted or goes on later. In the search's thread."""
        self._ends += 1
        self._rows[request.row] = NO_TOKEN
        request.row = -1  # the last, which is no request's: it may be wanted once more, when its cache opens late
        self._wanted.pop(request, None)
        ending = Ending.ABORTED if request.preempted else request.state.ending
        self._later.append(partial(self._recorder.end, request.state, ending))

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all that was asked for is done, with tokens that are on their way."""
        done, opened = threading.Event(), super().flush(timeout)
        self.after(None, lambda: self._later.append(done.set))
        return opened and done.wait(timeout) and super().flush(timeout)

    def close(self) -> None:
        """Record all tokens that were sampled, in at most `CLOSE_SECONDS` each, then stop. Idempotent."""
        self._told.put(False)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("agentspec: the last tokens did not arrive within %.0f s", CLOSE_SECONDS)
        super().close()

    def _work(self) -> None:
        while self._told.get():
            tokens, act = self._tasks.popleft()
            with self._failures.caught():
                if tokens is not None:
                    tokens.wait()
                act()
            if not self._due():
                self._search()

    def _due(self) -> bool:
        """Whether there is a task that need not wait for its tokens."""
        return bool(self._tasks) and ((tokens := self._tasks[0][0]) is None or tokens.arrived())

    def _resume(self, request: PassageRequest, output: Tokens) -> None:
        self.advance([(request, output)])
        request.drafted = False

    def want(self, request: PassageRequest, left: int = 0) -> None:
        """Search for the request, whose passages have so many tokens left. In the search's thread."""
        if request.state.drafts:
            self._wanted[request] = left

    def _search(self) -> None:
        """Find passages until a task is due, then have it recorded: for requests with the fewest tokens left first, of
        equals in any order, so that no row of a batch is always the last.
        """
        while self._wanted:
            started, order = perf_counter(), lambda request: (self._wanted[request], self._random.random())
            requests = sorted(self._wanted, key=order)[:SEARCHED]
            for request in requests:
                del self._wanted[request]
            with self._failures.caught():
                self._find(requests, started)
            if self._due():
                break
        while self._later:
            self._later.pop(0)()

    def _find(self, requests: Sequence[PassageRequest], started: float) -> None:
        shape, deletions = self._shape, Deletions.count
        found = find_passages(list(map(self._job, requests)), shape.ahead, self._vocabulary)
        found = found.reshape(len(requests), -1)
        if deletions != self._deletions:  # what was found before may hold deleted text
            self._deletions = deletions
            self._rows.fill(NO_TOKEN)
        self._rows[[request.row for request in requests]] = found
        self.found = Found(self._held.to(self._device, copy=True), deletions, self._ends)
        firsts = found[:, shape.overlap : shape.rows * shape.width : shape.width]
        metric("seconds").inc(perf_counter() - started)
        metric("searches", "done").inc(len(requests))
        metric("empty_rows").inc(int((firsts < 0).all(axis=1).sum()))

    def _job(self, request: PassageRequest) -> PassageJob:
        predicted, cache = request.state.from_prediction(self._shape.ahead), request.state.cache
        request.state.source = "prediction" if predicted else "cache"
        if cache is None:  # not open, or failed
            return request.text, None, (), predicted
        shapes = cache.partition.shapes  # which take as long as the exact matches, and gain passages 0.1 %
        return request.text, cache.drafter, [one for one in request.state.indexes if one[0] is not shapes], predicted
