"""`SpeculativeRetriever` wraps a LangChain retriever and answers early, or queries it less often."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar
from uuid import UUID
from weakref import WeakValueDictionary

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig, ensure_config
from pydantic import Field, PrivateAttr

from agentspec.errors import ConfigurationError
from agentspec.langchain.document_cache import DocumentCaches, RequestScope, Score, copies
from agentspec.langchain.knowledge import count_of_call
from agentspec.langchain.labels import labels_of_call
from agentspec.langchain.request_coalescer import RequestCoalescer, RetrieverCall
from agentspec.telemetry.safe_errors import error_location

T = TypeVar("T")

logger = logging.getLogger(__name__)

THREADS = 8  # for retriever calls in the background of synchronous calls
MAX_CORRECTIONS = 1024  # the most that are kept for `corrections`
_SILENT: RunnableConfig = {"callbacks": []}  # no callbacks: the run may be over

_request: ContextVar[RequestScope | None] = ContextVar("agentspec_retrieval_request", default=None)


@dataclass(frozen=True, slots=True)
class Correction:
    """A guess that was returned and turned out wrong; `documents` is the retriever's answer.

    If the retriever failed, `documents` is empty and `error` is its exception.
    """

    query: str
    guess: Sequence[Document]
    documents: Sequence[Document]
    error: BaseException | None = None


@dataclass(slots=True)
class RetrievalStats:
    """Counts of calls, of calls that joined an equal call in flight, of guesses, and of right and wrong guesses."""

    calls: int = 0
    joined: int = 0
    guesses: int = 0
    confirmed: int = 0
    corrected: int = 0


class SpeculativeRetriever(BaseRetriever):
    """Wraps `retriever` and guesses its answers from the documents that it returned before.

    With `mode="exact"` every call returns the retriever's answer. With `mode="correct"` a call returns a guess at once
    if the cached documents allow one, and queries the retriever in the background. If the retriever disagrees, a
    `Correction` goes to `on_correction` (called in the thread or event loop that verified) and to `corrections`.
    `ahead` works in both modes: it goes on with a guess and starts again if the guess was wrong.

    Documents are cached per `scope`: one request (a `with retriever.request():` block, or else the calls of one run of
    LangChain), one session (LangGraph's thread, `agentspec.workflow`), or all calls of this object, which must then
    serve one tenant only. A process that is forked begins without any.
    """

    retriever: BaseRetriever
    mode: Literal["exact", "correct"] = "exact"
    scope: Literal["request", "session", "retriever"] = "request"
    k: int | None = Field(default=None, ge=1, description="Documents handed out; the others found are only remembered")
    score: Score | None = Field(default=None, description="How to rank what is remembered; unset: by words")
    on_correction: Callable[[Correction], None] | None = None
    max_characters: int = Field(default=8_000_000, ge=0, description="Most text remembered, over all scopes")

    _caches: DocumentCaches = PrivateAttr()
    _coalescer: RequestCoalescer = PrivateAttr()
    _corrections: list[Correction] = PrivateAttr()
    _stats: RetrievalStats = PrivateAttr()
    _lock: threading.Lock = PrivateAttr()
    _behind: set[Future[Any]] = PrivateAttr()
    _tasks: set[asyncio.Task[None]] = PrivateAttr()
    _pool: ThreadPoolExecutor | None = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        self._begin()
        _retrievers[id(self)] = self

    def _begin(self) -> None:
        """Begin with nothing remembered, counted or under way."""
        self._caches = DocumentCaches(self.max_characters)
        self._coalescer = RequestCoalescer(self.retriever)
        self._corrections, self._stats = [], RetrievalStats()
        self._lock = threading.Lock()
        self._behind, self._tasks, self._pool = set(), set(), None

    @property
    def stats(self) -> RetrievalStats:
        """The counts so far."""
        with self._lock:
            return replace(self._stats, joined=self._coalescer.coalesced)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Calls inside the block belong to one request; its cached documents are deleted at the end."""
        request = RequestScope()
        token = _request.set(request)
        try:
            yield
        finally:
            _request.reset(token)
            self._caches.end(request)

    def prefetch(self, queries: Iterable[str]) -> None:
        """Query the retriever in threads for queries expected soon; the next equal call gets the answer.

        Raises `ConfigurationError` outside every scope, where no call could get the answer.
        """
        for query in queries:
            self._later(self._truth, self._early_call(query), early=True)

    async def aprefetch(self, queries: Iterable[str]) -> None:
        """As `prefetch`, for calls in this event loop. Returns when all answers have arrived; run it as a task."""
        truths = [self._atruth(self._early_call(query), early=True) for query in queries]
        await asyncio.gather(*truths, return_exceptions=True)

    async def ahead(self, query: str, then: Callable[[list[Document]], Awaitable[T]]) -> T:
        """Run `then` on guessed documents while the retriever is queried, and run it again if the guess was wrong.

        Returns the result of `then` for the retriever's documents, whatever `mode` is. Side effects of `then` may
        happen twice: the run on a wrong guess is cancelled at any point.
        """
        call = self._call_here(query)
        self._count(calls=1)
        guess = self._guess(call, self.k)
        truth = asyncio.ensure_future(self._atruth(call))
        if guess is None:
            return await then((await truth)[: self.k])
        early = asyncio.ensure_future(then(copies(guess)))
        try:
            documents = (await truth)[: self.k]
            if documents == guess:
                self._count(confirmed=1)
                return await early
            self._count(corrected=1)
        finally:
            truth.cancel()
            await _abandoned(early)
        return await then(documents)

    def corrections(self) -> list[Correction]:
        """The corrections since the last call, in order of arrival."""
        with self._lock:
            found, self._corrections = self._corrections, []
        return found

    def settle(self) -> list[Correction]:
        """Wait for all retriever calls in threads, then return `corrections()`."""
        with self._lock:
            behind = list(self._behind)
        wait(behind)
        return self.corrections()

    async def asettle(self) -> list[Correction]:
        """As `settle`, also for verifications in this event loop. Call it before the loop ends."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(task for task in self._tasks if task.get_loop() is loop))
        return await asyncio.to_thread(self.settle)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        k = count_of_call(k, self.k)
        call = self._call(query, ensure_config({"callbacks": run_manager.get_child()}), run_manager.parent_run_id)
        self._count(calls=1)
        if self.mode == "correct" and (guess := self._guess(call, k)) is not None:
            self._later(self._verify, replace(call, config=_SILENT), guess, k)
            return copies(guess)
        return self._truth(call)[:k]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None
    ) -> list[Document]:
        k = count_of_call(k, self.k)
        call = self._call(query, ensure_config({"callbacks": run_manager.get_child()}), run_manager.parent_run_id)
        self._count(calls=1)
        if self.mode == "correct" and (guess := self._guess(call, k)) is not None:
            task = asyncio.get_running_loop().create_task(self._averify(replace(call, config=_SILENT), guess, k))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return copies(guess)
        return (await self._atruth(call))[:k]

    def _call(self, query: str, config: RunnableConfig, parent: UUID | None) -> RetrieverCall:
        return RetrieverCall(query, self._scope_of(config, parent), config)

    def _call_here(self, query: str) -> RetrieverCall:
        """A call made directly inside the surrounding run, not through `invoke`."""
        config = ensure_config()
        return self._call(query, config, getattr(config.get("callbacks"), "parent_run_id", None))

    def _early_call(self, query: str) -> RetrieverCall:
        call = self._call_here(query)
        if call.scope is None:
            raise ConfigurationError(f"prefetch needs a {self.scope} around it, in which the call comes", param="scope")
        return call

    def _scope_of(self, config: RunnableConfig, parent: UUID | None) -> Hashable:
        """The scope whose calls share documents; None for a call that shares none."""
        if self.scope == "retriever":
            return "retriever"
        if self.scope == "session":
            session = labels_of_call(None, config.get("metadata")).session
            return None if session is None else ("session", session)
        if (request := _request.get()) is not None:
            return request
        return None if parent is None else ("run", parent)

    def _guess(self, call: RetrieverCall, k: int | None) -> list[Document] | None:
        guess = self._caches.guess(call.scope, call.query, k, self.score)
        self._count(guesses=guess is not None)
        return guess

    def _truth(self, call: RetrieverCall, *, early: bool = False) -> list[Document]:
        documents = self._coalescer.ask(call, early=early)
        self._caches.learn(call.scope, call.query, documents)
        return documents

    async def _atruth(self, call: RetrieverCall, *, early: bool = False) -> list[Document]:
        documents = await self._coalescer.aask(call, early=early)
        self._caches.learn(call.scope, call.query, documents)
        return documents

    def _verify(self, call: RetrieverCall, guess: list[Document], k: int | None) -> None:
        try:
            documents = self._truth(call)[:k]
        except Exception as error:
            self._correct(Correction(call.query, guess, (), error))
        else:
            self._compare(call, guess, documents)

    async def _averify(self, call: RetrieverCall, guess: list[Document], k: int | None) -> None:
        try:
            documents = (await self._atruth(call))[:k]
        except Exception as error:
            self._correct(Correction(call.query, guess, (), error))
        else:
            self._compare(call, guess, documents)

    def _compare(self, call: RetrieverCall, guess: list[Document], documents: list[Document]) -> None:
        if documents == guess:
            self._count(confirmed=1)
        else:
            self._correct(Correction(call.query, guess, documents))

    def _correct(self, correction: Correction) -> None:
        self._count(corrected=1)
        with self._lock:
            self._corrections.append(correction)
            del self._corrections[:-MAX_CORRECTIONS]
        if self.on_correction is not None:
            try:
                self.on_correction(correction)
            except Exception as error:
                logger.warning("on_correction failed: %s", error_location(error))

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self._stats, name, getattr(self._stats, name) + count)

    def _later(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Run `function` in a thread, with the current context variables."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, "agentspec-retrieval")
            future = self._pool.submit(copy_context().run, partial(function, *args, **options))
            self._behind.add(future)
        future.add_done_callback(self._done)

    def _done(self, future: Future[Any]) -> None:
        with self._lock:
            self._behind.discard(future)


_retrievers: WeakValueDictionary[int, SpeculativeRetriever] = WeakValueDictionary()


def _begin_anew() -> None:
    """In a forked process, where the threads are not that calls wait for, and any of them may have held a lock."""
    for retriever in list(_retrievers.values()):
        retriever._begin()  # noqa: SLF001


os.register_at_fork(after_in_child=_begin_anew)


async def _abandoned(task: asyncio.Future[Any]) -> None:
    """Cancel `task` and wait until it has ended, ignoring its result or error."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
