"""A pool as a backend, for strategies and for callers in this process. The gateway goes through `Attempts` itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agentspec.backends.base import NONE, Capabilities
from agentspec.backends.openai.backend import OpenAIBackend, payload
from agentspec.backends.openai.probe import ProbeReport
from agentspec.backends.openai.tokenization import ServerTokenization
from agentspec.backends.pool.pool import Attempts, Pool
from agentspec.errors import UpstreamError
from agentspec.placement import Call, prompt_blocks, scoped_call
from agentspec.types import Delta, GenerateRequest, Message

PATIENCE = 60.0  # seconds in which tries may begin, where a call has no deadline
T = TypeVar("T")


class PoolBackend:
    """Each call is placed by itself, and tried again at another server as `Attempts` says."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._shown: OpenAIBackend | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Those of the server that `probe` has reported, or of the first one: all should be alike."""
        shown = self._shown or next((member.backend for member, _ in self.pool.members()), None)
        return Capabilities(logprobs=True) if shown is None else shown.capabilities

    @property
    def tokenization(self) -> PoolTokenization | None:
        """The servers' tokenizer, if `probe` has found that each server which answers has one."""
        return None if self._shown is None or self._shown.tokenization is None else PoolTokenization(self)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Stream the answer of a server. Raises as that server's backend does, and `NoServerError`.

        After the first delta nothing is tried again.
        """
        blocks = prompt_blocks(request.tenant, payload(request, "")[1]) if self.pool.reads_prompts else ()
        call = scoped_call(request.tenant, request.labels.session, blocks)
        async for attempt in Attempts(self.pool, call, _until(request.deadline_s)):
            async with attempt:
                asked = request if attempt.model is None else replace(request, model=attempt.model)
                async with aclosing(attempt.backend.generate(asked)) as deltas:
                    async for delta in deltas:
                        attempt.answered(200, {})
                        yield delta

    async def models(self, headers: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """A server's own model list; `headers` may carry a client's key. Raises as `generate` does."""
        return await self._ask(lambda backend, _: backend.models(headers))

    async def probe(self, timeout: float = 10.0) -> ProbeReport:
        """Find out what the servers can do, and report one that answers, the least able. Never raises."""
        await self.pool.prepare()
        backends = [member.backend for member, _ in self.pool.members()]
        reports = await asyncio.gather(*(backend.probe(timeout) for backend in backends))
        answering = [at for at, report in enumerate(reports) if report.answers]
        if not answering:
            return next(iter(reports), ProbeReport(error="no server is known"))
        least = min(answering, key=lambda at: reports[at].tokenizes and reports[at].token_ids)
        self._shown = backends[least]
        return reports[least]

    async def ask_tokenizer(self, ask: Callable[[ServerTokenization], Awaitable[T]]) -> T:
        """What `ask` gets from the tokenizer of a server. Raises as `generate` does."""

        async def asked(backend: OpenAIBackend, _: str | None) -> T:
            if backend.tokenization is None:  # it did not answer when it was probed, or came later
                await backend.probe()
            if backend.tokenization is None:
                raise UpstreamError(f"a server of {self.pool.name} has no tokenizer, which others have")
            return await ask(backend.tokenization)

        return await self._ask(asked)

    async def any_server(self) -> tuple[OpenAIBackend, str | None]:
        """A server for a request that is no client's call, and its name for the model. Raises `NoServerError`."""
        await self.pool.prepare()
        placed = self.pool.place(Call())
        if placed is None:
            raise self.pool.no_server()
        member, model = placed
        return member.backend, model

    async def leave_loop(self) -> None:
        for member, _ in self.pool.members():
            await member.backend.leave_loop()

    async def aclose(self) -> None:
        for member, _ in self.pool.members():
            await member.backend.aclose()

    async def _ask(self, ask: Callable[[OpenAIBackend, str | None], Awaitable[T]]) -> T:
        async for attempt in Attempts(self.pool, Call(), _until(None)):
            async with attempt:
                return await ask(attempt.backend, attempt.model)
        raise AssertionError("the last try raises or returns")


@dataclass(frozen=True, slots=True)
class PoolTokenization:
    """The tokenizer and chat template of a pool's servers, of which any is asked. Raises as `PoolBackend` does."""

    pool: PoolBackend

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] = NONE,
    ) -> str:
        return await self.pool.ask_tokenizer(lambda side: side.render(messages, tools, template_arguments))

    async def tokenize(self, text: str, *, begins: bool = False) -> list[int]:
        return await self.pool.ask_tokenizer(lambda side: side.tokenize(text, begins=begins))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self.pool.ask_tokenizer(lambda side: side.detokenize(token_ids))


def _until(seconds: float | None) -> float:
    return asyncio.get_running_loop().time() + (PATIENCE if seconds is None else seconds)
