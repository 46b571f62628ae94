"""Reading ahead: what is known of a caller's next prompt is read into KV slots while its tools run, in idle time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from agentspec.backends.torch.engine.prefix_cache import common_prefix
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.errors import InvalidRequestError
from agentspec.protocol.responses import Accumulator
from agentspec.telemetry.safe_errors import safe_message
from agentspec.types import Delta, GenerateRequest, Message

if TYPE_CHECKING:
    from agentspec.backends.torch.engine.engine import Engine

logger = logging.getLogger(__name__)

WAITS = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0)  # seconds between looks at an engine that is busy
UNKNOWN = ("0", "x")  # two texts without a common beginning


def known_prompt(tokenizer: TokenizerAdapter, request: GenerateRequest) -> list[int]:
    """The token ids with which every prompt begins that goes on behind the messages of `request`. Two renderings that
    differ in what is unknown show it, whatever the chat template makes of the messages.

    Raises `InvalidRequestError` for messages that the template refuses.
    """
    messages = list(request.messages or ())
    variants = (replace(request, messages=continued(messages, text), start_answer=False) for text in UNKNOWN)
    first, second = (tokenizer.prompt(each) for each in variants)
    return first[: common_prefix(np.asarray(first), np.asarray(second))]


def continued(messages: list[Message], text: str) -> list[Message]:
    """The messages with `text` as what follows: results of the calls that have none yet, else the user's words."""
    last = next((at for at in reversed(range(len(messages))) if messages[at].get("role") == "assistant"), len(messages))
    answered = {message.get("tool_call_id") for message in messages[last + 1 :]}
    calls = [call["id"] for one in messages[last : last + 1] for call in one.get("tool_calls") or ()]
    results = [{"role": "tool", "tool_call_id": id, "content": text} for id in calls if id not in answered]
    return [*messages, *(results or [{"role": "user", "content": text}])]


def after_calls(request: GenerateRequest, answer: Accumulator) -> GenerateRequest | None:
    """The request that follows an answer with tool calls, as far as it is known: OpenAI's clients do not send thoughts
    back. None for an answer without calls, for several answers, and for one that was continued.
    """
    choices = answer.all()
    calls: list[dict[str, Any]] = choices[0][1].extra.get("tool_calls") or []
    if len(choices) != 1 or not calls or request.messages is None or request.continue_final:
        return None
    said: Message = {"role": "assistant", "content": "".join(choices[0][1].text), "tool_calls": calls}
    return replace(request, messages=[*request.messages, said])


class NextTurns:
    """The next turns of one backend's callers. `off_the_loop` runs work on a request's prompt in a thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenizerAdapter,
        off_the_loop: Callable[[GenerateRequest, Callable[[], list[int]]], Awaitable[list[int]]],
    ) -> None:
        self._engine, self._tokenizer, self._off_the_loop = engine, tokenizer, off_the_loop
        self._waiting: dict[str, asyncio.Task[None]] = {}  # by the id of the first call that has no result yet

    def watch(self, request: GenerateRequest) -> Callable[[Delta], None]:
        """Stop expecting the turn that `request` is. Returns what is to be called with each delta of its answer."""
        for message in reversed(request.messages or ()):
            if message.get("role") != "tool":
                break
            if task := self._waiting.pop(str(message.get("tool_call_id")), None):
                with suppress(RuntimeError):  # its loop may be another, or closed
                    task.get_loop().call_soon_threadsafe(task.cancel)
        answer = Accumulator()

        def follow(delta: Delta) -> None:
            answer.add(delta)
            if delta.finish_reason == "tool_calls" and (following := after_calls(request, answer)) is not None:
                self._expect(following)

        return follow

    async def aclose(self) -> None:
        """Cancel what waits, of the running loop; another loop ended with its tasks."""
        loop = asyncio.get_running_loop()
        waiting, self._waiting = [task for task in self._waiting.values() if task.get_loop() is loop], {}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def _expect(self, following: GenerateRequest) -> None:
        assert following.messages, "a turn follows an answer"
        first = str(following.messages[-1]["tool_calls"][0].get("id"))
        task = self._waiting[first] = asyncio.create_task(self._launch(following))
        task.add_done_callback(lambda _: self._waiting.pop(first, None))

    async def _launch(self, request: GenerateRequest) -> None:
        """Queue the next turn once the engine rests: a prompt is not even tokenized for an engine that is busy."""
        scheduler = self._engine.scheduler
        deletions = scheduler.deletions
        for seconds in WAITS:
            await asyncio.sleep(seconds)
            if scheduler.idle:
                break
        else:
            return
        try:
            if deletions == scheduler.deletions:
                tokens = await self._off_the_loop(request, partial(known_prompt, self._tokenizer, request))
                self._engine.read_ahead(request, tokens, deletions)
        except InvalidRequestError:  # a template without tools' results: the caller will send something else
            pass
        except Exception as error:
            logger.warning("the next turn is not read ahead: %s", safe_message(error))
