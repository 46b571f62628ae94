"""What large bodies may cost the gateway: memory while their requests run, and threads to read them in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from agentspec.backends.tenant_threads import TenantThreads
from agentspec.errors import OverloadedError

T = TypeVar("T")

INLINE_BYTES = 1 << 16  # reading a body up to this size takes less time than it takes to wake a thread and be woken


class BodyBudget:
    """Bounds the bytes of all bodies in memory, and reads large ones off the loop.

    With several tenants (`shared`), one of them may hold half of the bytes. Large bodies are read in `threads` threads,
    of which one tenant never takes the last.
    """

    def __init__(self, limit: int, threads: int, *, shared: bool = True) -> None:
        self._limit = limit
        self.shared = shared
        self._held: Counter[str] = Counter()
        self._threads = TenantThreads(threads, "agentspec-body")

    @property
    def held(self) -> int:
        """The bytes of all bodies that are in memory now."""
        return self._held.total()

    @contextmanager
    def account(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """An account of one request's body: call it with the size of each piece; the end of the block gives all back.

        A piece for which there is no room raises `OverloadedError`.
        """
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            share = self._limit // 2 if self.shared else self._limit
            if self.held + size > self._limit or self._held[tenant] + size > share:
                raise OverloadedError("too many large requests are being answered already (server.max_body_memory)")
            self._held[tenant] += size
            taken += size

        try:
            yield take
        finally:
            self._held[tenant] -= taken
            if not self._held[tenant]:
                del self._held[tenant]

    async def run(self, tenant: str, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """The result of `function(*arguments)`, which works on a body of `size` bytes: in a thread if it is large."""
        if size <= INLINE_BYTES:
            return function(*arguments)
        return await self._threads.run(tenant, function, *arguments)
