"""One background event loop per process, in its own thread, for callers that do not run on the runtime's loop.

`iterate_sync` and `call_sync` serve synchronous callers, `iterate_async` callers on any asyncio loop. The loop starts
on demand and closes at exit, together with the runtimes that use it. A process that is forked begins with another one.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from agentspec.backends.base import closing_items
from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.errors import ShuttingDownError
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings, load_settings

T = TypeVar("T")


class _BackgroundLoop:
    """The process's one background event loop, and the runtimes that use it."""

    def __init__(self) -> None:
        self._of_parent: object = None
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._runtimes: dict[str | OpenAISettings, Runtime] = {}

    def get(self) -> BlockingPortal:
        with self._lock:
            if self._portal is None:
                self._portal = self._stack.enter_context(start_blocking_portal("asyncio", name="agentspec"))
                _at_exit(self.close)
            return self._portal

    def runtime(self, model: str | None) -> Runtime:
        with self._lock:
            if "" not in self._runtimes:
                self._runtimes[""] = Runtime(load_settings())
            base = self._runtimes[""]
            if model is None or model in base.models() or base.takes_any_model or base.settings.names_models:
                return base
            if model not in self._runtimes:
                local = TorchSettings(model=model)
                settings = base.settings.model_copy(update={"backends": {"local": local}})
                self._runtimes[model] = Runtime(settings, cache=base.cache)
            return self._runtimes[model]

    def remote(self, settings: OpenAISettings) -> Runtime:
        with self._lock:
            if settings not in self._runtimes:
                address = settings.url  # what errors call it
                name = f"{address.scheme}://{address.host}:{address.port}{address.path or ''}"
                self._runtimes[settings] = Runtime(Settings(backends={name: settings}))
            return self._runtimes[settings]

    def close(self) -> None:
        """Close the backends, the cache they shared, and the loop."""
        with self._lock:
            portal, self._portal = self._portal, None
            runtimes, self._runtimes = list(self._runtimes.values()), {}
            for runtime in runtimes:
                if portal is not None:
                    portal.call(runtime.close_backends)
            for runtime in runtimes:
                runtime.close_cache()
            self._stack.close()

    def leave_behind(self) -> None:
        """Begin again in a forked process, where the loop's thread is not: nothing here may wait for it, or for a lock
        that it may have held. The runtimes stay unfreed, as they have threads of their own.
        """
        portal, stack, self._of_parent = self._portal, self._stack, self._runtimes
        self._begin()
        if portal is not None:
            with suppress(StopIteration, RuntimeError):
                portal.stop().send(None)  # it now refuses what closing the stack would ask of its loop
            stack.close()


def _at_exit(function: Callable[[], object]) -> None:
    """Call `function` at exit while threads still run: `atexit` handlers run after the thread pools have ended.

    These hooks run last in, first out, so the thread pools' hook, which their import registers, must come first.
    """
    import concurrent.futures.thread  # noqa: F401

    getattr(threading, "_register_atexit", atexit.register)(function)


_loop = _BackgroundLoop()
os.register_at_fork(after_in_child=_loop.leave_behind)


def shared_runtime(model: str | None = None) -> Runtime:
    """The process's shared runtime, configured by `$AGENTSPEC_CONFIG` and the environment, closed at exit.

    If no backend is configured, `model` may be anything that the local engine can load: a built-in name, a folder,
    a GGUF file or a model-hub id. Its engine is then built in addition to the default one and shares its cache.
    Use the runtime through `iterate_sync` or `iterate_async` only: its connections belong to the background loop.
    """
    return _loop.runtime(model)


def remote_runtime(settings: OpenAISettings) -> Runtime:
    """The process's shared runtime for one endpoint, with any model name. Equal settings share connections."""
    return _loop.remote(settings)


def call_sync(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run `function(*args)` on the background loop and wait for its result."""
    return _loop.get().call(function, *args)


def iterate_sync(make: Callable[[], AsyncIterator[T]]) -> Generator[T, None, None]:
    """Iterate `make()` on the background loop from a synchronous caller. Closing the iterator cancels the work."""
    items: queue.SimpleQueue[_Item[T]] = queue.SimpleQueue()
    pump = _Pump(make, items.put)
    _loop.get().start_task_soon(pump.run)
    ended = False
    try:
        while not (ended := (item := items.get()).last):
            yield cast(T, item.value)
        if item.error is not None:
            raise item.error
    finally:
        pump.cancel()
        while not ended:
            ended = items.get().last


async def iterate_async(make: Callable[[], AsyncIterator[T]]) -> AsyncGenerator[T]:
    """Iterate `make()` on the background loop from any asyncio loop. Closing the iterator cancels the work.

    Connections and engines thus belong to one loop, even if the callers run on several loops.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[_Item[T]] = asyncio.Queue()
    pump = _Pump(make, lambda item: loop.call_soon_threadsafe(items.put_nowait, item))
    _loop.get().start_task_soon(pump.run)
    ended = False
    try:
        while not (ended := (item := await items.get()).last):
            yield cast(T, item.value)
        if item.error is not None:
            raise item.error
    finally:
        pump.cancel()
        with anyio.CancelScope(shield=True):
            while not ended:
                ended = (await items.get()).last


@dataclass(frozen=True, slots=True)
class _Item(Generic[T]):
    value: T | None = None
    error: BaseException | None = None
    last: bool = False


class _Pump(Generic[T]):
    """Iterates `make()` on the background loop. Any thread may call `cancel`, and `put` gets a last item in any case.

    The future of `start_task_soon` is not cancelled for it: anyio's callback fails where the task ends just then.
    """

    def __init__(self, make: Callable[[], AsyncIterator[T]], put: Callable[[_Item[T]], object]) -> None:
        self._make, self._put = make, put
        self._cancelled = False
        self._cancel: Callable[[], object] | None = None

    def cancel(self) -> None:
        self._cancelled = True  # seen by `run` if it has not begun
        if self._cancel is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._cancel()

    async def run(self) -> None:
        """Iterate within a single task from start to end, as cancel scopes inside generators require."""
        with anyio.CancelScope() as scope:
            loop = asyncio.get_running_loop()
            self._cancel = lambda: loop.call_soon_threadsafe(scope.cancel)
            if self._cancelled:
                scope.cancel()
            await self._iterate()

    async def _iterate(self) -> None:
        error: BaseException | None = None
        try:
            iterator = self._make()
            async with closing_items(iterator):
                async for value in iterator:
                    self._put(_Item(value))
        except Exception as raised:
            error = raised
        except BaseException:
            error = ShuttingDownError("the generation was cancelled")  # only a consumer that did not cancel sees it
            raise
        finally:
            self._put(_Item(error=error, last=True))
