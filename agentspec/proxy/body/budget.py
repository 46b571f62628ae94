"""What large bodies and answers may cost the gateway: memory while their requests run, and threads to read them in."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.types import Message, Receive

from agentspec.backends.threads import TenantThreads
from agentspec.errors import AnswerMemoryError, OverloadedError

T = TypeVar("T")

PARSING_THREADS = 2
INLINE_BYTES = 1 << 16  # reading a body up to this size takes less time than it takes to wake a thread and be woken
ANSWER_SECONDS = 10.0  # that an answer waits for memory: it was computed already, so that a wait is worth its while


class BodyBudget:
    """Bounds the bytes of all bodies and large answers in memory, and reads large ones off the loop.

    Answers may hold half of the bytes, so that clients who do not read theirs leave room for requests. With several
    tenants (`shared`), one of them may hold half of either. Large bodies are read in threads, of which one
    tenant never takes the last. Use it in one event loop.
    """

    def __init__(self, limit: int, *, shared: bool = True) -> None:
        self._limit = limit
        self.shared = shared
        self._bytes = _Held()
        self._answers = _Held()  # of these bytes
        self._freed = asyncio.Event()  # the next time that memory is given back
        self._threads = TenantThreads(PARSING_THREADS, "agentspec-body")

    def account(self, tenant: str) -> BodyAccount:
        """An account of what one request holds, as a context whose end gives all back."""
        return BodyAccount(self, tenant)

    async def run(self, tenant: str, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """The result of `function(*arguments)`, which works on a body of `size` bytes: in a thread if it is large."""
        if size <= INLINE_BYTES:
            return function(*arguments)
        return await self._threads.run(tenant, function, *arguments)

    @property
    def held(self) -> int:
        """The bytes of all bodies and large answers that are in memory now."""
        return self._bytes.total

    # What a `BodyAccount` calls.

    def share(self, limit: int) -> int:
        """How much of what all may hold one tenant may hold."""
        return limit // 2 if self.shared else limit

    @property
    def answer_limit(self) -> int:
        return self._limit // 2

    def has_room(self, tenant: str, size: int) -> bool:
        return self._bytes.has_room(tenant, size, self._limit, self.share(self._limit))

    def add(self, tenant: str, size: int, *, answer: bool) -> None:
        self._bytes.add(tenant, size)
        if answer:
            self._answers.add(tenant, size)
        if size < 0:
            self._freed.set()
            self._freed = asyncio.Event()

    async def wait(self, account: BodyAccount, size: int) -> None:
        """Wait until there is room for `size` bytes more of an answer; `account` then holds them."""
        tenant, most = account.tenant, self.answer_limit
        while not (self.has_room(tenant, size) and self._answers.has_room(tenant, size, most, self.share(most))):
            await self._freed.wait()
        account.hold(size, answer=True)


class _Held:
    """Bytes that are held, in all and by each tenant."""

    def __init__(self) -> None:
        self.total = 0
        self._by_tenant: Counter[str] = Counter()

    def has_room(self, tenant: str, size: int, limit: int, share: int) -> bool:
        return self.total + size <= limit and self._by_tenant[tenant] + size <= share

    def add(self, tenant: str, size: int) -> None:
        self.total += size
        self._by_tenant[tenant] += size
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class BodyAccount:
    """What one request holds of a budget: the pieces of its body, and of a large answer to it."""

    __slots__ = ("_answer", "_body", "_budget", "_collected", "tenant")

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self.tenant = tenant
        self._body = self._answer = self._collected = 0

    def __enter__(self) -> BodyAccount:
        return self

    def __exit__(self, *error: object) -> None:
        self.hold(-self._body)
        if self._answer:
            self.hold(-self._answer, answer=True)

    def __call__(self, size: int) -> None:
        """Take room for a piece of the body. Raises `OverloadedError` if there is none."""
        if not self._budget.has_room(self.tenant, size):
            raise OverloadedError("too many large requests are being answered already (server.max_body_memory)")
        self.hold(size)

    def counting(self, receive: Receive) -> Receive:
        """`receive` that takes room for each piece of the body as it comes, whoever asks for it."""

        async def counted() -> Message:
            message = await receive()
            if body := message.get("body"):
                self(len(body))
            return message

        return counted

    async def wait_for(self, size: int) -> None:
        """Take room for `size` bytes of an answer, and wait for it if need be. Raises `AnswerMemoryError` if there is
        none in time.
        """
        if size > self._budget.share(self._budget.answer_limit):
            raise AnswerMemoryError("the answer is larger than the memory for answers (server.max_body_memory)")
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._budget.wait(self, size)
        except TimeoutError:
            raise AnswerMemoryError(
                "too many large answers are being sent already (server.max_body_memory); try again later"
            ) from None

    async def grow(self, size: int) -> None:
        """Have room for `size` bytes more of an answer, of which the first 64 KiB need none. Raises as `wait_for`."""
        self._collected += size
        missing = self._collected - INLINE_BYTES - self._answer
        if missing > 0:
            await self.wait_for(-(-missing // INLINE_BYTES) * INLINE_BYTES)  # seldom, however small its pieces are

    @property
    def answer(self) -> int:
        """The bytes that are held of the answer."""
        return self._answer

    async def run(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """As `BodyBudget.run`, for this request's tenant."""
        return await self._budget.run(self.tenant, size, function, *arguments)

    def hold(self, size: int, *, answer: bool = False) -> None:
        """Hold `size` bytes more, or fewer if it is negative, without asking whether there is room."""
        if answer:
            self._answer += size
        else:
            self._body += size
        self._budget.add(self.tenant, size, answer=answer)
