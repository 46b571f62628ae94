"""After an answer with tool calls: has what is known of the next prompt read while the caller's tools run."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from agentspec.backends.torch.engine.prefill.known_prompt import after_calls, known_prompt
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.errors import InvalidRequestError
from agentspec.protocol.responses import Accumulator
from agentspec.telemetry.safe_errors import safe_message
from agentspec.types import Delta, GenerateRequest

logger = logging.getLogger(__name__)

WAITS = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0)  # seconds between looks at an engine that is busy: then it helps nobody

OffTheLoop = Callable[[GenerateRequest, Callable[[], list[int]]], Awaitable[list[int]]]


@dataclass(slots=True)
class AnswerWatch:
    """Follows an answer to `request`, and tells `ended` of its last delta before the client sees it."""

    request: GenerateRequest
    ended: Callable[[GenerateRequest, Accumulator], None]
    answer: Accumulator = field(default_factory=Accumulator)

    def add(self, delta: Delta) -> Delta:
        self.answer.add(delta)
        if delta.finish_reason == "tool_calls":
            self.ended(self.request, self.answer)
        return delta


class NextTurns:
    """The next turns of one backend's callers. `queue` takes a tenant's tokens as `Engine.prefill` does, `is_idle`
    tells whether the engine rests, `off_the_loop` runs work on a request's prompt in a thread.
    """

    def __init__(
        self,
        tokenizer: TokenizerAdapter,
        queue: Callable[[str, list[int]], bool],
        is_idle: Callable[[], bool],
        off_the_loop: OffTheLoop,
        *,
        enabled: bool = True,
    ) -> None:
        self._tokenizer, self._queue, self._is_idle, self._off_the_loop = tokenizer, queue, is_idle, off_the_loop
        self._enabled = enabled
        self._deletions = 0  # so far: what was on its way when one came is not read ahead
        self._lock = threading.Lock()
        self._waiting: dict[str, asyncio.Task[None]] = {}  # by the id of the first call that has no result yet

    def watch(self, request: GenerateRequest) -> Callable[[Delta], Delta]:
        """What to pass the answer's deltas through."""
        self._came(request)
        wanted = self._enabled and request.prefill_next and request.store and request.tools and request.sampling.n == 1
        return AnswerWatch(request, self._ended).add if wanted else lambda delta: delta

    async def prefill(self, request: GenerateRequest) -> bool:
        """As `TorchBackend.prefill`."""
        if not request.store or request.messages is None:
            return False
        known, deletions = partial(known_prompt, self._tokenizer, request), self._deletions
        tokens = await self._off_the_loop(request, known)
        with self._lock:
            return deletions == self._deletions and self._queue(request.tenant, tokens)

    def forget(self) -> None:
        """Something is deleted: what is on its way may hold its text. Any thread may call this, before the queue."""
        with self._lock:
            self._deletions += 1

    async def aclose(self) -> None:
        """Cancel what waits, of the running loop; another loop ended with its tasks."""
        loop = asyncio.get_running_loop()
        waiting, self._waiting = [task for task in self._waiting.values() if task.get_loop() is loop], {}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def _came(self, request: GenerateRequest) -> None:
        """The next turn has come before its prompt was read: it is expected no more."""
        for message in reversed(request.messages or ()):
            if message.get("role") != "tool":
                return
            if task := self._waiting.pop(str(message.get("tool_call_id")), None):
                _cancel(task)

    def _ended(self, request: GenerateRequest, answer: Accumulator) -> None:
        following = after_calls(request, answer)
        if following is None or following.messages is None:
            return
        first = str(following.messages[-1]["tool_calls"][0].get("id"))
        task = asyncio.create_task(self._launch(following))
        self._waiting[first] = task
        task.add_done_callback(lambda _: self._waiting.pop(first, None))

    async def _launch(self, request: GenerateRequest) -> None:
        """Queue the next turn once the engine rests: a prompt is not even tokenized for an engine that is busy."""
        deletions = self._deletions
        for seconds in WAITS:
            await asyncio.sleep(seconds)
            if self._is_idle():
                break
        else:
            return
        try:
            if deletions == self._deletions:
                await self.prefill(request)
        except InvalidRequestError:  # a template without tools' results: the caller will send something else
            pass
        except Exception as error:
            logger.warning("the next turn is not read ahead: %s", safe_message(error))


def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel a task of any loop; one whose loop was closed will never run."""
    with suppress(RuntimeError):
        task.get_loop().call_soon_threadsafe(task.cancel)
