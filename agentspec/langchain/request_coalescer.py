"""Questions to a retriever that are under way: equal ones share an answer, and those of one moment go in one batch."""

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

MAX_EARLY = 256  # answers fetched ahead of their question that are kept for it

Documents = list[Document]
_Place = tuple[asyncio.AbstractEventLoop | None, Hashable]


@dataclass(frozen=True, slots=True)
class Call:
    """A question. It may share an answer with equal ones of its scope; one of the scope None with nobody."""

    query: str
    scope: Hashable
    config: RunnableConfig


class Flights:
    """Asks `retriever`. Thread-safe; what runs in an event loop is shared within that loop alone."""

    def __init__(self, retriever: BaseRetriever) -> None:
        self._retriever = retriever
        self._under_way: dict[_Place, Any] = {}
        self._early: OrderedDict[_Place, Any] = OrderedDict()
        self._boarding: dict[asyncio.AbstractEventLoop, list[tuple[Call, asyncio.Future[Documents]]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = threading.Lock()
        self.joined = 0

    def ask(self, call: Call, *, early: bool = False) -> Documents:
        """The answer, from an equal call under way if there is one. With `early` the next equal call gets it too."""
        place = (None, (call.scope, call.query))
        future: Future[Documents] = Future()
        if (other := self._board(place, call, future, early)) is not None:
            return copies(other.result())
        try:
            future.set_result(self._retriever.invoke(call.query, call.config))
        except BaseException as error:
            future.set_exception(error)
        self._land(place, failed=future.exception() is not None)
        return future.result()

    async def aask(self, call: Call, *, early: bool = False) -> Documents:
        """As `ask`; different calls of one turn of the event loop go to the retriever's `abatch` together."""
        loop = asyncio.get_running_loop()
        place = (loop, (call.scope, call.query))
        future: asyncio.Future[Documents] = loop.create_future()
        other = self._board(place, call, future, early)
        if other is None:
            future.add_done_callback(lambda done: self._landed(place, done))
            if loop not in self._boarding:
                self._boarding[loop] = []
                loop.call_soon(self._depart, loop)
            self._boarding[loop].append((call, future))
        documents = await asyncio.shield(other or future)
        return copies(documents) if other else documents

    def _board(self, place: _Place, call: Call, future: Any, early: bool) -> Any:
        """The equal call to wait for; None if `future` now is the one that others wait for."""
        if call.scope is None:
            return None
        with self._lock:
            other = self._under_way.get(place) or (None if early else self._early.pop(place, None))
            if other is not None:
                self.joined += 1
                return other
            self._under_way[place] = future
            if early:
                self._early[place] = future
                while len(self._early) > MAX_EARLY:
                    self._early.popitem(last=False)
            return None

    def _land(self, place: _Place, *, failed: bool) -> None:
        """A failure is told to those who waited; the next call asks again."""
        with self._lock:
            self._under_way.pop(place, None)
            if failed:
                self._early.pop(place, None)

    def _landed(self, place: _Place, done: asyncio.Future[Documents]) -> None:
        self._land(place, failed=done.cancelled() or done.exception() is not None)

    def _depart(self, loop: asyncio.AbstractEventLoop) -> None:
        task = loop.create_task(self._fly(self._boarding.pop(loop)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fly(self, boarded: Sequence[tuple[Call, asyncio.Future[Documents]]]) -> None:
        try:
            for (_, future), answer in zip(boarded, await self._answers([call for call, _ in boarded]), strict=True):
                _settle(future, answer)
        finally:
            for _, future in boarded:
                future.cancel()  # of those that have no answer because this was cancelled

    async def _answers(self, calls: Sequence[Call]) -> Sequence[Documents | Exception]:
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
