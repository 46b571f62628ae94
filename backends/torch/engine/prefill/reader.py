"""Reads expected prompts into prefix slots, a chunk a turn, in turns that nobody else on the device wants."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from agentspec.backends.torch.engine.prefill.job import PrefillJob, PrefillQueue
from agentspec.backends.torch.engine.prefix_cache import SHORTEST
from agentspec.backends.torch.engine.scheduler import Scheduler
from agentspec.backends.torch.engine.sequence import EngineContext
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.device import is_device_error, synchronize
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.errors import ContextLengthError, OverloadedError
from agentspec.speculation.governor import CHUNKS
from agentspec.telemetry.safe_errors import error_location

logger = logging.getLogger(__name__)

CHUNK_SECONDS = 0.05  # what comes meanwhile waits no longer, if a smaller chunk is that fast


class PrefillReader:
    """A worker of the computing thread, for the turns in which no other worker is ready.

    The slots of the prompt being read are lent by the scheduler, so that all slots stay within the budget. `pause`
    moves what was read to the prefix cache, where the request finds it; the job goes on from there later.
    """

    def __init__(
        self, context: EngineContext, scheduler: Scheduler, device_failed: Callable[[BaseException], None]
    ) -> None:
        self.queue = PrefillQueue()
        self._context, self._scheduler = context, scheduler
        self._device_failed = device_failed
        self._job: PrefillJob | None = None
        self._cache: SequenceCache | None = None
        self._give_back: Callable[[], None] = lambda: None

    def add(self, tenant: str, tokens: Sequence[int]) -> bool:
        """Expect a prompt that begins with `tokens`; False if its slots could not be kept, or the model could not
        answer it. Any thread may call this.
        """
        fits = SHORTEST <= len(tokens) < self._context.target.context_length
        if not fits or not self._scheduler.keeps(len(tokens)) or self._scheduler.closed:
            return False
        self.queue.add(tenant, tokens)
        return True

    @property
    def ready(self) -> bool:
        return self._scheduler.idle and self.queue.due() is not None

    def turn(self) -> None:
        """Read one chunk of one prompt. Only the computing thread may call this."""
        try:
            self._read()
        except BaseException as error:
            self._abandon()
            if not isinstance(error, Exception) or is_device_error(error):
                self._device_failed(error)
                return
            logger.warning("a prompt is not read ahead: %s", error_location(error))

    def pause(self) -> None:
        """Make room for other work: keep what was read. Only the computing thread may call this, before it carries out
        deletions, which then find what was read where all other slots are.
        """
        job, cache, self._job, self._cache = self._job, self._cache, None, None
        self._returned()
        if job is not None and cache is not None:
            self._scheduler.keep(job.tenant, job.tokens[: cache.length].tolist(), cache, guessed=True)

    def fail(self, error: BaseException) -> None:
        """The device failed, which the engine is told as well."""
        self.close()

    def close(self) -> None:
        """Forget all jobs and give everything back."""
        self._job = self._cache = None
        self._returned()
        self.queue.clear()

    def _read(self) -> None:
        job = self.queue.due()
        if job is None:
            return
        if job is not self._job:
            self.pause()
            if not self._begin(job):
                self.queue.settle(job)
                return
        assert self._cache is not None
        if self._cache.length < len(job.tokens):
            self._read_chunk(job, self._cache)
        if self._cache.length == len(job.tokens):
            self.queue.settle(job)
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
        self._cache = self._scheduler.reusable(job.tenant, job.tokens.tolist(), len(job.tokens))
        if self._cache is None:
            fresh = self._context.target.new_cache(len(job.tokens))
            assert isinstance(fresh, SequenceCache), "slots that cannot be kept"
            self._cache = fresh
        return True

    def _read_chunk(self, job: PrefillJob, cache: SequenceCache) -> None:
        chunk = job.tokens[cache.length : cache.length + self._chunk(cache.length)].tolist()
        self._context.target.forward_batch([BatchItem(cache, chunk, needs_logits=False)])
        cache.commit(len(chunk), ())
        synchronize(self._context.target.device)  # else a device could be given chunks ahead of other work
        self.queue.computed(job, len(chunk))

    def _chunk(self, context: int) -> int:
        """How many tokens to read at once: the more the cheaper, unless others would wait for long."""
        seconds = self._context.governor.cost.seconds
        return next((size for size in CHUNKS if seconds(size, context) <= CHUNK_SECONDS), CHUNKS[-1])

    def _abandon(self) -> None:
        """Drop the job that failed, with its slots."""
        if self._job is not None:
            self.queue.cancel(self._job)
        self._job = self._cache = None
        self._returned()

    def _returned(self) -> None:
        give_back, self._give_back = self._give_back, lambda: None
        give_back()
