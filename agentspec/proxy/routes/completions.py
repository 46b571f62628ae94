"""Several prompts in one request for text completions: generated side by side, answered as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.errors import InvalidRequestError
from agentspec.protocol.completions import CompletionWriter
from agentspec.protocol.speculation import summed
from agentspec.proxy.endpoint import Exchange, GenerationEndpoint
from agentspec.types import MAX_CHOICES, Delta, Speculation, Usage

AT_ONCE = 4  # prompts of one request that are generated together: others' requests keep their turns
HELD = 64  # deltas that wait to be sent

Answer = Callable[[], AsyncGenerator[Delta]]


@dataclass(slots=True)
class CompletionsEndpoint(GenerationEndpoint):
    """Answers each prompt as a request of its own. Choices come in the order of the prompts, `n` for each."""

    async def _respond(self, exchange: Exchange) -> None:
        prompts = _several(exchange.fields.get("prompt"))
        if prompts is None or isinstance(exchange.route.backend, OpenAIBackend):
            await super(CompletionsEndpoint, self)._respond(exchange)  # slots give the class another object
            return
        record, backend = exchange.record, exchange.route.backend
        if len(prompts) > MAX_CHOICES:
            message = f"prompt has {len(prompts)} entries; {MAX_CHOICES} are allowed"
            raise InvalidRequestError(message, param="prompt")
        one = partial(self._parse, caller=exchange.caller, backend=backend, record=record)
        parsed = await self._run(exchange, lambda: [one({**exchange.fields, "prompt": each}) for each in prompts])
        first, writer = parsed[0]
        per, count = first.sampling.n, len(prompts) * first.sampling.n
        if count > MAX_CHOICES:
            message = f"the request asks for {count} answers; {MAX_CHOICES} are allowed"
            raise InvalidRequestError(message, param="n")
        whole = replace(first, sampling=replace(first.sampling, n=count))
        shown = CompletionWriter(whole, writer.format, per)
        exchange.release()
        answers = [partial(self.runtime.answer, request, exchange.route) for request, _ in parsed]
        await self._answer(merged(answers, per), shown, exchange)


def _several(prompt: Any) -> list[Any] | None:
    """The prompts of a request with more than one; token ids are one prompt."""
    if not isinstance(prompt, list) or len(prompt) < 2 or not any(isinstance(one, (str, list)) for one in prompt):
        return None
    texts = all(isinstance(one, str) for one in prompt)
    if not texts and not all(isinstance(one, list) and not isinstance((one or [0])[0], (str, list)) for one in prompt):
        message = "prompt must be a text, token ids, or an array of several texts or of several token ids"
        raise InvalidRequestError(message, param="prompt")
    return prompt


async def merged(answers: Sequence[Answer], per_prompt: int) -> AsyncGenerator[Delta]:
    """The deltas of all answers as they come, with the indices of their choices in all; the last carries the totals.

    Raises what the first answer that fails raises; the others are then cancelled, as on closing.
    """
    work = _Work(iter(enumerate(answers)), per_prompt)
    workers = [asyncio.create_task(work.run()) for _ in range(min(AT_ONCE, len(answers)))]
    totals, ended, working = _Totals(), 0, len(workers)
    try:
        while working:
            item = await work.queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                working -= 1
                continue
            totals.add(item)
            ended += item.finish_reason is not None
            last = item.finish_reason is not None and ended == len(answers) * per_prompt
            yield replace(item, usage=totals.usage if last else None, speculation=totals.speculation if last else None)
    finally:
        for worker in workers:
            worker.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait(workers)


@dataclass(slots=True)
class _Work:
    """The answers of one request that are left, each with its number, and the deltas of those that run."""

    left: Iterator[tuple[int, Answer]]
    per_prompt: int
    queue: asyncio.Queue[Delta | Exception | None] = field(default_factory=lambda: asyncio.Queue(HELD))

    async def run(self) -> None:
        """Generate one answer after the other. None on the queue says that none is left."""
        try:
            for number, answer in self.left:
                async with aclosing(answer()) as deltas:
                    async for delta in deltas:
                        await self.queue.put(replace(delta, index=number * self.per_prompt + delta.index))
            await self.queue.put(None)
        except Exception as error:
            await self.queue.put(error)


@dataclass(slots=True)
class _Totals:
    """What all answers used together."""

    usage: Usage | None = None
    speculation: Speculation | None = None

    def add(self, delta: Delta) -> None:
        if (used := delta.usage) is not None:
            before = self.usage or Usage()
            self.usage = Usage(
                before.prompt_tokens + used.prompt_tokens,
                before.completion_tokens + used.completion_tokens,
                before.cached_tokens + used.cached_tokens,
            )
        if (done := delta.speculation) is not None:
            self.speculation = done if self.speculation is None else summed([self.speculation, done])
