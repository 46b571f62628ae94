"""Coalesces retriever calls: equal calls in flight share an answer, calls of one event-loop turn share a batch."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig

from agentspec.langchain.document_cache import copies

MAX_EARLY = 256  # prefetched answers kept for a later call

Documents = list[Document]
_Place = tuple[asyncio.AbstractEventLoop | None, Hashable]


@dataclass(frozen=True, slots=True)
class RetrieverCall:
    """One query. Equal calls of one scope may share an answer; a call whose scope is None shares nothing."""

    query: str
    scope: Hashable
    config: RunnableConfig


class RequestCoalescer:
    """Coalesces calls to `retriever`. Thread-safe; calls in an event loop are shared within that loop only."""

    def __init__(self, retriever: BaseRetriever) -> None:
        self._retriever = retriever
        self._in_flight: dict[_Place, Any] = {}
        self._early: OrderedDict[_Place, Any] = OrderedDict()
        self._pending: dict[asyncio.AbstractEventLoop, list[tuple[RetrieverCall, asyncio.Future[Documents]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self.coalesced = 0

    def ask(self, call: RetrieverCall, *, early: bool = False) -> Documents:
        """The answer, from an equal call in flight if there is one. With `early`, the next equal call gets it too."""
        place = (None, (call.scope, call.query))
        future: Future[Documents] = Future()
        if (other := self._join(place, call, future, early)) is not None:
            return copies(other.result())
        try:
            future.set_result(self._retriever.invoke(call.query, call.config))
        except BaseException as error:
            future.set_exception(error)
        self._complete(place, failed=future.exception() is not None)
        documents = future.result()
        return documents if call.scope is None else copies(documents)  # other threads may copy them only later

    async def aask(self, call: RetrieverCall, *, early: bool = False) -> Documents:
        """As `ask`; different calls made in one event-loop turn go to the retriever's `abatch` together."""
        loop = asyncio.get_running_loop()
        place = (loop, (call.scope, call.query))
        future: asyncio.Future[Documents] = loop.create_future()
        other = self._join(place, call, future, early)
        if other is None:
            future.add_done_callback(lambda done: self._completed(place, done))
            if loop not in self._pending:
                self._pending[loop] = []
                loop.call_soon(self._flush, loop)
            self._pending[loop].append((call, future))
        documents = await asyncio.shield(other or future)
        return copies(documents) if other else documents

    def _join(self, place: _Place, call: RetrieverCall, future: Any, early: bool) -> Any:
        """The future of an equal call to wait for; None if other callers now wait for `future`."""
        if call.scope is None:
            return None
        with self._lock:
            other = self._in_flight.get(place) or (None if early else self._early.pop(place, None))
            if other is not None:
                self.coalesced += 1
                return other
            self._in_flight[place] = future
            if early:
                self._early[place] = future
                while len(self._early) > MAX_EARLY:
                    self._early.popitem(last=False)
            return None

    def _complete(self, place: _Place, *, failed: bool) -> None:
        """Remove a finished call. Callers waiting for it get its failure too; the next call queries the retriever."""
        with self._lock:
            self._in_flight.pop(place, None)
            if failed:
                self._early.pop(place, None)

    def _completed(self, place: _Place, done: asyncio.Future[Documents]) -> None:
        self._complete(place, failed=done.cancelled() or done.exception() is not None)

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        task = loop.create_task(self._run(self._pending.pop(loop)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: Sequence[tuple[RetrieverCall, asyncio.Future[Documents]]]) -> None:
        try:
            for (_, future), answer in zip(batch, await self._answers([call for call, _ in batch]), strict=True):
                _settle(future, answer)
        finally:
            for _, future in batch:
                future.cancel()  # futures without an answer: this task was cancelled

    async def _answers(self, calls: Sequence[RetrieverCall]) -> Sequence[Documents | Exception]:
        try:
            if len(calls) == 1:
                return [await self._retriever.ainvoke(calls[0].query, calls[0].config)]
            queries, configs = [call.query for call in calls], [call.config for call in calls]
            answers: Sequence[Any] = await self._retriever.abatch(queries, configs, return_exceptions=True)
            if len(answers) != len(calls):
                raise ValueError(f"the retriever gave {len(answers)} answers to {len(calls)} queries")
            return answers
        except Exception as error:
            return [error] * len(calls)


def _settle(future: asyncio.Future[Documents], answer: Documents | Exception) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
