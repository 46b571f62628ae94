"""Reading ahead: what is known of a caller's next prompt is read into KV slots while its tools run, in idle time."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from agentspec.backends.torch.engine.prefix_cache import SHORTEST, Tokens, common_prefix
from agentspec.backends.torch.engine.scheduler import Scheduler
from agentspec.backends.torch.engine.sequence import EngineContext
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.device import is_device_error, synchronize
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.cache.deletion import Reach
from agentspec.errors import ContextLengthError, InvalidRequestError, OverloadedError
from agentspec.protocol.responses import Accumulator
from agentspec.speculation.governor import CHUNKS
from agentspec.telemetry.safe_errors import error_location, safe_message
from agentspec.types import Delta, GenerateRequest, Message

if TYPE_CHECKING:
    from agentspec.backends.torch.engine.engine import Engine

logger = logging.getLogger(__name__)

WAITS = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0)  # seconds between looks at an engine that is busy: then it helps nobody
MOST_JOBS = 32
JOB_SECONDS = 120.0  # a prompt that has not come by then is expected no more
BOUNDARY = 2  # tokens at the end of what is known that the text behind may change
CHUNK_SECONDS = 0.05  # what comes meanwhile waits no longer, if a smaller chunk is that fast
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
        self._reader = engine.reads_ahead()
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
        deletions = self._reader.queue.deletions
        for seconds in WAITS:
            await asyncio.sleep(seconds)
            if self._engine.scheduler.idle:
                break
        else:
            return
        try:
            if deletions == self._reader.queue.deletions:
                tokens = await self._off_the_loop(request, partial(known_prompt, self._tokenizer, request))
                self._engine.prefill(request.tenant, tokens, deletions)
        except InvalidRequestError:  # a template without tools' results: the caller will send something else
            pass
        except Exception as error:
            logger.warning("the next turn is not read ahead: %s", safe_message(error))


@dataclass(slots=True, eq=False)
class PrefillJob:
    """`tokens` begin a prompt that `tenant` is expected to send until the time `expires`.

    `read` counts the tokens computed for it so far; `done` says that nothing is left to read.
    """

    tenant: str
    tokens: Tokens
    expires: float
    read: int = 0
    done: bool = False


class PrefillQueue:
    """The prompts that one engine expects, oldest first. Thread-safe.

    `counts` gets the jobs for which tokens were computed ("launched"), those of them whose prompt came ("used") or did
    not come ("cancelled"), and the "tokens". `deletions` counts calls of `forget`.
    """

    def __init__(self, counts: Counter[str], clock: Callable[[], float] = monotonic) -> None:
        self.counts = counts
        self.jobs: list[PrefillJob] = []
        self.deletions = 0
        self._clock = clock
        self._lock = threading.Lock()

    def add(self, tenant: str, tokens: Sequence[int], deletions: int | None = None) -> bool:
        """Expect a prompt that begins with `tokens`; False if something was deleted since there were `deletions`.

        Where there are too many, the oldest gives way of the tenant that has most.
        """
        job = PrefillJob(tenant, np.asarray(tokens, dtype=np.int64), self._clock() + JOB_SECONDS)
        with self._lock:
            if deletions not in (None, self.deletions):
                return False
            self.jobs.append(job)
            if len(self.jobs) > MOST_JOBS:
                held = Counter(one.tenant for one in self.jobs)
                self._end(next(one for one in self.jobs if held[one.tenant] == max(held.values())))
            return True

    def arrived(self, tenant: str, prompt: Sequence[int]) -> None:
        """A request has come: what it was expected to ask is expected no more."""
        if not self.jobs:
            return
        tokens = np.asarray(prompt, dtype=np.int64)
        with self._lock:
            for job in [one for one in self.jobs if one.tenant == tenant]:
                if common_prefix(job.tokens, tokens) >= max(SHORTEST, len(job.tokens) - BOUNDARY):
                    self._end(job, "used")

    def due(self) -> PrefillJob | None:
        """The job to go on with; None if nothing is left to read."""
        if not self.jobs:
            return None
        now = self._clock()
        with self._lock:
            for job in [one for one in self.jobs if one.expires <= now]:
                self._end(job)
            return next((job for job in self.jobs if not job.done), None)

    def computed(self, job: PrefillJob, tokens: int) -> None:
        """Count tokens that were computed for a job."""
        self.counts["launched"] += not job.read
        self.counts["tokens"] += tokens
        job.read += tokens

    def cancel(self, job: PrefillJob) -> None:
        with self._lock:
            if job in self.jobs:
                self._end(job)

    def forget(self, reach: Reach) -> None:
        """Expect nothing more of the tenants that a deletion concerns: what was expected may derive from its text."""
        with self._lock:
            self.deletions += 1
            for job in [one for one in self.jobs if reach.concerns(one.tenant)]:
                self._end(job)

    def _end(self, job: PrefillJob, how: str = "cancelled") -> None:
        self.jobs.remove(job)
        self.counts[how] += bool(job.read)


class PrefillReader:
    """A worker of the computing thread, for the turns in which no other worker is ready: reads a chunk a turn.

    The slots of the prompt being read are lent by the scheduler, so that all slots stay within the budget. `pause`
    moves what was read to the prefix cache, where the request finds it; the job goes on from there later.
    """

    def __init__(
        self, context: EngineContext, scheduler: Scheduler, device_failed: Callable[[BaseException], None]
    ) -> None:
        self.queue = PrefillQueue(context.counters.prefills)
        self._context, self._scheduler = context, scheduler
        self._device_failed = device_failed
        self._job: PrefillJob | None = None
        self._cache: SequenceCache | None = None
        self._give_back: Callable[[], None] = lambda: None

    def takes(self, tokens: Sequence[int]) -> bool:
        """Whether the slots of `tokens` could be kept, and the model could answer a prompt that they begin."""
        fits = SHORTEST <= len(tokens) < self._context.target.context_length
        return fits and self._scheduler.keeps(len(tokens)) and not self._scheduler.closed

    @property
    def reading(self) -> bool:
        """Whether slots are lent for a prompt that is partly read."""
        return self._job is not None

    @property
    def ready(self) -> bool:
        return self._scheduler.idle and self.queue.due() is not None

    def turn(self) -> None:
        """Read one chunk of one prompt. Only the computing thread may call this."""
        try:
            self._read()
        except BaseException as error:
            if self._job is not None:
                self.queue.cancel(self._job)
            self._drop()
            if not isinstance(error, Exception) or is_device_error(error):
                self._device_failed(error)
                return
            logger.warning("a prompt is not read ahead: %s", error_location(error))

    def pause(self) -> None:
        """Make room for other work: keep what was read. Only the computing thread may call this, before it carries out
        deletions, which then find what was read where all other slots are.
        """
        job, cache = self._job, self._cache
        self._drop()
        if job is not None and cache is not None:
            self._scheduler.keep(job.tenant, job.tokens[: cache.length].tolist(), cache, guessed=True)

    def fail(self, error: BaseException) -> None:
        """The device failed: expect nothing more and give everything back."""
        self._drop()
        self.queue.jobs.clear()

    def _read(self) -> None:
        job = self.queue.due()
        if job is None:
            return
        if job is not self._job:
            self.pause()
            if not self._begin(job):
                job.done = True
                return
        assert self._cache is not None
        if self._cache.length < len(job.tokens):
            self._read_chunk(job, self._cache)
        if self._cache.length == len(job.tokens):
            job.done = True
            self.pause()

    def _begin(self, job: PrefillJob) -> bool:
        """Begin behind the slots that are there; False if few are missing, or if there is no memory."""
        missing = len(job.tokens) - self._scheduler.prefix_cache.known(job.tenant, job.tokens)
        if missing < SHORTEST:
            return False
        try:
            self._give_back = self._scheduler.kv_budget.lend(len(job.tokens), self._scheduler.active)
        except (OverloadedError, ContextLengthError):
            return False
        self._job = job
        found = self._scheduler.reusable(job.tenant, job.tokens.tolist(), len(job.tokens))
        self._cache = found or SequenceCache(len(job.tokens))
        return True

    def _read_chunk(self, job: PrefillJob, cache: SequenceCache) -> None:
        """Read as many tokens as others may wait for: the more at once the cheaper."""
        seconds = self._context.governor.cost.seconds
        size = next((size for size in CHUNKS if seconds(size, cache.length) <= CHUNK_SECONDS), CHUNKS[-1])
        chunk = job.tokens[cache.length : cache.length + size].tolist()
        self._context.target.forward_batch([BatchItem(cache, chunk, needs_logits=False)])
        cache.commit(len(chunk), ())
        synchronize(self._context.target.device)  # else a device could be given chunks ahead of other work
        self.queue.computed(job, len(chunk))

    def _drop(self) -> None:
        """Stop reading, and give the slots back."""
        self._job = self._cache = None
        give_back, self._give_back = self._give_back, lambda: None
        give_back()
