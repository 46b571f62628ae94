"""Several prompts in one request for text completions: generated side by side, answered as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import anyio

from agentspec.errors import InvalidRequestError
from agentspec.protocol.speculation import summed
from agentspec.types import MAX_CHOICES, Delta, Usage

AT_ONCE = 4  # prompts of one request that are generated together: others' requests keep their turns
HELD = 64  # deltas that wait to be sent

Answer = Callable[[], AsyncGenerator[Delta]]


def several_prompts(prompt: Any) -> list[Any]:
    """The prompts of a request, at most `MAX_CHOICES`: token ids are one prompt."""
    if not isinstance(prompt, list) or len(prompt) < 2 or not isinstance(prompt[0], (str, list)):
        return [prompt]
    if len(prompt) > MAX_CHOICES:
        message = f"prompt has {len(prompt)} entries; {MAX_CHOICES} are allowed"
        raise InvalidRequestError(message, param="prompt")
    return prompt


async def merged(answers: Sequence[Answer], per_prompt: int) -> AsyncGenerator[Delta]:
    """The deltas of all answers as they come, with the indices of their choices in all; the last carries the totals.

    Raises what the first answer that fails raises; the others are then cancelled, as on closing.
    """
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(HELD)
    left = iter(enumerate(answers))

    async def work() -> None:
        """Generate one answer after the other. None on the queue says that none is left."""
        try:
            for number, answer in left:
                async with aclosing(answer()) as deltas:
                    async for delta in deltas:
                        await queue.put(replace(delta, index=number * per_prompt + delta.index))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    workers = [asyncio.create_task(work()) for _ in range(min(AT_ONCE, len(answers)))]
    working, ends = len(workers), list[Delta]()
    try:
        while working:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                working -= 1
            elif item.finish_reason is None:
                yield item
            else:
                ends.append(item)
                last = len(ends) == len(answers) * per_prompt
                done = [one.speculation for one in ends if last and one.speculation]
                yield replace(item, usage=_usage(ends) if last else None, speculation=summed(done))
    finally:
        for worker in workers:
            worker.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait(workers)


def _usage(ends: Sequence[Delta]) -> Usage:
    used = [one.usage for one in ends if one.usage]
    return Usage(
        sum(one.prompt_tokens for one in used),
        sum(one.completion_tokens for one in used),
        sum(one.cached_tokens for one in used),
    )
