"""Who waits for large grammars: tenants take turns, and whoever asks for the same grammar waits for the same turn."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from agentspec.backends.tenant_threads import TenantThreads
from agentspec.errors import OverloadedError

T = TypeVar("T")
MOST_FORMS: Final = 16  # different large grammars of a tenant that wait or are compiled
RETRY_SECONDS: Final = 2.0


@dataclass(slots=True)
class _Turn(Generic[T]):
    future: Future[T]
    callers: int = 0


class CompileQueue(Generic[T]):
    """Compiles one grammar at a time in a thread of its own. Safe to use from several event loops."""

    def __init__(self) -> None:
        self._threads = TenantThreads(1, "agentspec-grammar")
        self._lock = threading.Lock()
        self._turns: dict[tuple[str, Hashable], _Turn[T]] = {}
        self._forms: Counter[str] = Counter()

    async def result(self, tenant: str, key: Hashable, function: Callable[[], T]) -> T:
        """The result of `function`, called once for all callers of a tenant that wait with the same `key`.

        A turn that nobody waits for any more is given up. Raises `OverloadedError` if too many grammars of the tenant
        wait, and `ShuttingDownError`.
        """
        turn = self._join(tenant, key, function)
        waiting = asyncio.wrap_future(turn.future)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may have no caller any more
        try:
            return await asyncio.shield(waiting)
        finally:
            self._leave(tenant, key, turn)

    def close(self) -> None:
        """Take no more grammars: what waits gets `ShuttingDownError`, what runs ends by itself."""
        self._threads.close()

    def _join(self, tenant: str, key: Hashable, function: Callable[[], T]) -> _Turn[T]:
        with self._lock:
            turn = self._turns.get((tenant, key))
            if turn is None:
                if self._forms[tenant] >= MOST_FORMS:
                    message = f"{MOST_FORMS} large grammars of yours wait to be compiled; send this request again later"
                    raise OverloadedError(message, retry_after=RETRY_SECONDS)
                turn = self._turns[tenant, key] = _Turn(self._threads.submit(tenant, function))
                self._forms[tenant] += 1
            turn.callers += 1
            return turn

    def _leave(self, tenant: str, key: Hashable, turn: _Turn[T]) -> None:
        with self._lock:
            turn.callers -= 1
            if turn.callers:
                return
            del self._turns[tenant, key]
            self._forms[tenant] -= 1
            if not self._forms[tenant]:
                del self._forms[tenant]
        turn.future.cancel()
