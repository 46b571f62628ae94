"""Reading ahead: what is known of a caller's next prompt is read into KV slots while its tools run, in idle time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from agentspec.backends.torch.engine.prefix_cache import common_prefix
from agentspec.backends.torch.engine.scheduler import ScheduledSequence, Scheduler
from agentspec.backends.torch.engine.sequence import EngineContext, EngineRequest, Sequence
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.cache.deletion import Reach
from agentspec.errors import InvalidRequestError
from agentspec.protocol.responses import Accumulator
from agentspec.speculation.governor import CHUNKS
from agentspec.telemetry.safe_errors import safe_message
from agentspec.types import Delta, GenerateRequest, Message

if TYPE_CHECKING:
    from agentspec.backends.torch.engine.engine import Engine

logger = logging.getLogger(__name__)

GUESS_SECONDS = 0.05  # what comes while an expected prompt is read waits no longer, if a smaller chunk is that fast
MOST_EXPECTED = 32
BOUNDARY = 2  # tokens at the end of an expected prompt that the text behind may change
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


class Guesses:
    """The prompts that one engine's callers are expected to send, each as a request that is only read.

    Any thread may call `expect`. The scheduler calls the rest: `startable`, `drop`, `next` and `forget` with its lock
    held, the others in the computing thread.
    """

    def __init__(self, scheduler: Scheduler, context: EngineContext) -> None:
        self._scheduler, self._context = scheduler, context
        self._expected: list[EngineRequest] = []  # the next one first

    def expect(self, guess: EngineRequest, deletions: int) -> bool:
        """Queue a prompt to be read in idle time. False if no request could go on behind it, or if something was
        deleted since there were `deletions`. Of more than `MOST_EXPECTED` the oldest goes of the tenant that has most.
        """
        scheduler, budget = self._scheduler, self._scheduler.kv_budget
        if len(guess.prompt) >= self._context.target.context_length or budget.needed(guess) > budget.limit:
            return False
        with scheduler.lock:
            if scheduler.closed or deletions != scheduler.deletions:
                return False
            self._expected.append(guess)
            if len(self._expected) > MOST_EXPECTED:
                queued = Counter(one.tenant for one in self._expected)
                self._expected.remove(max(self._expected, key=lambda one: queued[one.tenant]))  # of equals the first
            return True

    @property
    def startable(self) -> bool:
        """Whether the next one can be read now."""
        return bool(self._expected) and self._scheduler.has_room(self._expected[0])

    def drop(self, request: EngineRequest) -> None:
        """Expect `request`, which has arrived, no more. The text behind a guess may have changed its last tokens."""
        self._expected = [guess for guess in self._expected if not _begins(guess, request)]

    def forget(self, reach: Reach) -> None:
        """Drop what may derive from deleted text."""
        self._expected = [guess for guess in self._expected if not reach.concerns(guess.tenant)]

    def next(self) -> EngineRequest | None:
        """The next one that is to be read while nothing runs; None if there is none."""
        return self._expected.pop(0) if not self._scheduler.active and self.startable else None

    def step(self) -> ScheduledSequence | None:
        """The step of the guess that is active, if one is: it is read alone, without a draw, in the largest chunk that
        is brief enough for what may come meanwhile.
        """
        sequence = next((one for one in self._scheduler.active if one.request.guess), None)
        if sequence is None:
            return None
        past, seconds = sequence.kv_cache.length, self._context.governor.cost.seconds
        size = next((size for size in CHUNKS if seconds(size, past) <= GUESS_SECONDS), CHUNKS[-1])
        return ScheduledSequence(sequence, min(size, sequence.num_uncomputed), draws=False)

    def pause(self) -> None:
        """Make room for other work: what was read of a guess is stored, and the rest is read later."""
        scheduler = self._scheduler
        for sequence in [one for one in scheduler.active if one.request.guess]:
            deletions = scheduler.deletions
            scheduler.remove(sequence, clean=True)
            with scheduler.lock:
                if deletions == scheduler.deletions and not sequence.request.forgotten:
                    self._expected.insert(0, sequence.request)

    def count(self, sequence: Sequence) -> None:
        """Count what was computed for a guess that is removed."""
        prefills = self._context.counters.prefills
        prefills["launched"] += sequence.finished
        prefills["tokens"] += sequence.kv_cache.length - sequence.reused

    def claim(self, request: EngineRequest) -> None:
        """Count that `request` found slots that were read ahead, if it did."""
        used = self._scheduler.prefix_cache.claim(request.tenant, request.prompt)
        self._context.counters.prefills["used"] += used


def _begins(guess: EngineRequest, request: EngineRequest) -> bool:
    end = len(guess.prompt) - BOUNDARY
    return guess.tenant == request.tenant and guess.prompt[:end] == request.prompt[:end]


class NextTurns:
    """The next turns of one backend's callers. `off_the_loop` runs work on a request's prompt in a thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenizerAdapter,
        off_the_loop: Callable[[GenerateRequest, Callable[[], list[int]]], Awaitable[list[int]]],
    ) -> None:
        self._engine, self._tokenizer, self._off_the_loop = engine, tokenizer, off_the_loop
        scheduler = engine.scheduler
        self._guesses = scheduler.guesses = scheduler.guesses or Guesses(scheduler, engine.context)
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
                self._read_ahead(request, tokens, deletions)
        except InvalidRequestError:  # a template without tools' results: the caller will send something else
            pass
        except Exception as error:
            logger.warning("the next turn is not read ahead: %s", safe_message(error))

    def _read_ahead(self, request: GenerateRequest, tokens: list[int], deletions: int) -> None:
        """Have `tokens`, which begin the prompt that follows `request`, read into slots that it will find."""
        original = GenerateRequest(
            request.model, token_ids=tokens, tenant=request.tenant, labels=request.labels, speculation=False
        )
        guess = EngineRequest(original, tokens, 1, frozenset(), None, deliver=lambda item: None, guess=True)
        if self._guesses.expect(guess, deletions):
            self._engine.wake()
