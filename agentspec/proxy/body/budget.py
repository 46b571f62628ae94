"""What large bodies and answers may cost the gateway: memory while their requests run, and threads to read them in."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from starlette.types import Message, Receive

from agentspec.backends.threads import TenantThreads
from agentspec.errors import AnswerMemoryError, OverloadedError

T = TypeVar("T")

PARSING_THREADS = 2
INLINE_BYTES = 1 << 16  # reading a body up to this size takes less time than it takes to wake a thread and be woken
ANSWER_SECONDS = 10.0  # that an answer waits for memory: it was computed already, so that a wait is worth its while


class _Memory:
    def __init__(self, limit: int, *, shared: bool) -> None:
        self.limit, self.share, self.total = limit, limit // 2 if shared else limit, 0
        self._by_tenant: Counter[str] = Counter()

    def has_room(self, tenant: str, size: int) -> bool:
        return self.total + size <= self.limit and self._by_tenant[tenant] + size <= self.share

    def add(self, tenant: str, size: int) -> None:
        self.total += size
        self._by_tenant[tenant] += size


class BodyBudget:
    """Bounds the bytes of all bodies and large answers in memory, and reads large ones off the loop.

    Answers may hold half of the bytes, so that clients who do not read theirs leave room for requests. With several
    tenants (`shared`), one of them may hold half of either. Large bodies are read in threads, of which one
    tenant never takes the last. Use it in one event loop.
    """

    def __init__(self, limit: int, *, shared: bool = True) -> None:
        self.memory = _Memory(limit, shared=shared)
        self.answers = _Memory(limit // 2, shared=shared)  # of these bytes
        self._freed = asyncio.Event()  # the next time that memory is given back
        self.threads = TenantThreads(PARSING_THREADS, "agentspec-body")

    def body(self, tenant: str) -> RequestBody:
        """A request's body that is not read yet, as a context whose end gives back all that the request holds."""
        return RequestBody(self, tenant)

    def add(self, tenant: str, size: int, *, answer: bool) -> None:
        self.memory.add(tenant, size)
        if answer:
            self.answers.add(tenant, size)
        if size < 0:
            self._freed.set()
            self._freed = asyncio.Event()

    async def wait(self, tenant: str, size: int) -> None:
        while not (self.memory.has_room(tenant, size) and self.answers.has_room(tenant, size)):
            await self._freed.wait()


class RequestBody:
    """The body of one request, read as `fields`, and what the request holds of a budget: `held` bytes for the body with
    what is read besides, and `answer` bytes for a large answer.
    """

    __slots__ = ("_budget", "_collected", "answer", "data", "fields", "held", "tenant")

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self.tenant = tenant
        self.data = b""
        self.fields: Mapping[str, Any] = {}
        self.held = self.answer = self._collected = 0

    def __enter__(self) -> RequestBody:
        return self

    def __exit__(self, *error: object) -> None:
        self.hold(-self.held)
        if self.answer:
            self.hold(-self.answer, answer=True)

    def release(self) -> None:
        """Drop the body, which is not needed any more: an answer can take minutes."""
        self.data, self.fields = b"", {}

    def take(self, size: int) -> None:
        """Take room for `size` bytes of the body. Raises `OverloadedError` if there is none."""
        if not self._budget.memory.has_room(self.tenant, size):
            raise OverloadedError("too many large requests are being answered already (server.max_body_memory)")
        self.hold(size)

    def counting(self, receive: Receive) -> Receive:
        """`receive` that takes room for each piece of the body as it comes."""

        async def counted() -> Message:
            message = await receive()
            if body := message.get("body"):
                self.take(len(body))
            return message

        return counted

    async def wait_for(self, size: int) -> None:
        """Take room for `size` bytes of an answer, and wait for it if need be. Raises `AnswerMemoryError` if there is
        none in time.
        """
        if size > self._budget.answers.share:
            raise AnswerMemoryError("the answer is larger than the memory for answers (server.max_body_memory)")
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._budget.wait(self.tenant, size)
        except TimeoutError:
            raise AnswerMemoryError(
                "too many large answers are being sent already (server.max_body_memory); try again later"
            ) from None
        self.hold(size, answer=True)

    async def grow(self, size: int) -> None:
        """Have room for `size` bytes more of an answer, of which the first 64 KiB need none. Raises as `wait_for`."""
        self._collected += size
        missing = self._collected - INLINE_BYTES - self.answer
        if missing > 0:
            await self.wait_for(-(-missing // INLINE_BYTES) * INLINE_BYTES)  # seldom, however small its pieces are

    async def work(self, function: Callable[..., T], *arguments: Any, size: int | None = None) -> T:
        """The result of work on the body, or on `size` bytes of something else: in a thread if they are many."""
        if (self.held if size is None else size) <= INLINE_BYTES:
            return function(*arguments)
        return await self._budget.threads.run(self.tenant, function, *arguments)

    def hold(self, size: int, *, answer: bool = False) -> None:
        """Hold `size` bytes more, or fewer if it is negative, without asking whether there is room."""
        if answer:
            self.answer += size
        else:
            self.held += size
        self._budget.add(self.tenant, size, answer=answer)
