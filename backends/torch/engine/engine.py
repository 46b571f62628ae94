"""The engine runs one step after another; in each step all scheduled sequences share one forward."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TypeVar

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.engine.cache_session import CacheSession
from agentspec.backends.torch.engine.compute_thread import compute_thread, stopped_by
from agentspec.backends.torch.engine.scheduler import ScheduledSequence, Scheduler, kv_length
from agentspec.backends.torch.engine.sequence import EngineContext, EngineRequest, Sequence
from agentspec.backends.torch.engine.speculator import StepEstimate, depth_first, subtree
from agentspec.backends.torch.model.device import is_async_device, is_device_error, is_out_of_memory, synchronize
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.sampler import fetch
from agentspec.cache.deletion import Reach
from agentspec.errors import AgentSpecError, EngineError, EngineStoppedError, ShuttingDownError
from agentspec.speculation.governor import Governor
from agentspec.telemetry.safe_errors import error_location
from agentspec.types import Delta

logger = logging.getLogger(__name__)

T = TypeVar("T")
JOIN_SECONDS = 60.0


class Engine:
    """Runs requests to their end. Any thread may call `submit`, `cancel` and `close`.

    The scheduler decides which sequences are computed. An error in one request is delivered to that request alone. Only
    an error of the device ends the engine: `failure` then says so, and every further request is refused with it.
    """

    def __init__(
        self,
        context: EngineContext,
        settings: TorchSettings,
        open_session: Callable[[EngineRequest], CacheSession],
        *,
        keeps_prefixes: bool = True,
    ) -> None:
        self.context = context
        self.scheduler = Scheduler(context, settings, keeps_prefixes=keeps_prefixes)
        context.free_memory = self.scheduler.prefix_cache.clear
        self._open_session = open_session
        self.failure: EngineStoppedError | None = None
        self._ended = threading.Event()
        self._thread = compute_thread(context.target.device)
        self._thread.add(self)
        self.wake = self._thread.wake  # lets the computing thread look for work

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises the errors of `Scheduler.add`, and `EngineStoppedError` once the device failed."""
        self.require_running()
        self.scheduler.add(request)
        self.wake()

    def forget(self, reach: Reach) -> None:
        """Reuse nothing any more of what a deletion covers: neither KV slots nor what is read ahead.

        The memory is freed before the next step. Any thread may call this.
        """
        # First what is open is marked, then what is stored is to be looked through before the next step: what ends in
        # between is either marked or stored by then.
        self.scheduler.mark_forgotten(reach)
        self.scheduler.prefix_cache.forget(reach)
        self.wake()

    def cancel(self, request: EngineRequest) -> None:
        """Give the request's place to others now; its work ends before the next step. Nothing if it has finished."""
        if self.scheduler.cancel(request):
            self.wake()

    def lend(self, slots: int) -> Callable[[], None]:
        """Set KV slots aside for work outside the answers, for which idle ones make room. Only the computing thread may
        call this, and any thread the function returned, which gives them back. Raises as `KVBudget.lend`.
        """
        scheduler = self.scheduler
        if scheduler.guesses is not None:
            scheduler.guesses.pause()
        give_back = scheduler.kv_budget.lend(slots, scheduler.active)
        scheduler.prefix_cache.shrink(scheduler.kv_budget.idle_bytes(scheduler.active))

        def end() -> None:
            give_back()
            self.wake()

        return end

    def require_running(self) -> None:
        """Raise `EngineStoppedError` once the device failed."""
        if self.failure is not None:
            raise EngineStoppedError(self.failure.message)

    def close(self) -> None:
        """Fail all running and waiting requests with `ShuttingDownError` and free the key/value memory. Idempotent."""
        self.scheduler.closed = True
        self.wake()
        if not self._thread.current:
            self._ended.wait(JOIN_SECONDS)

    @property
    def ready(self) -> bool:
        return self.scheduler.closed or self.scheduler.has_work or self.scheduler.prefix_cache.forgets

    @property
    def spare(self) -> bool:
        return self.scheduler.has_guess

    def turn(self) -> None:
        """Run one step. Only the computing thread may call this."""
        if self._ended.is_set():
            return
        try:
            if self.scheduler.closed:
                self._end(ShuttingDownError("the engine was shut down"))
                return
            self.scheduler.prefix_cache.shrink(None)  # frees the memory of what was deleted
            self._step()
        except BaseException as error:
            if isinstance(error, Exception) and not is_device_error(error):
                self._recover(error)
            else:
                self.device_failed(error)

    def device_failed(self, error: BaseException) -> None:
        """End the engine, and all others on the same accelerator, because `error` says that nothing can be computed any
        more. Only the computing thread may call this.
        """
        if is_async_device(self.context.target.device):
            self._thread.fail(error)
        else:  # a processor has no state that one engine's error could leave behind for another
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Fail all requests, and refuse further ones, because of `error`."""
        if not self._ended.is_set():
            logger.critical("the engine ended: %s", error_location(error))
            self.failure = stopped_by(error)
            self._end(self.failure)

    def _step(self) -> None:
        self.scheduler.remove_cancelled()
        scheduled = self.scheduler.schedule(self._start)
        for sequence, outcome in run_step(scheduled, self.context):
            try:
                self._finish(sequence, outcome)
            except Exception as error:
                self.scheduler.remove(sequence, clean=False)
                self._fail(sequence.request, error)
                if is_device_error(error):
                    raise

    def _recover(self, error: Exception) -> None:
        """Go on after a step that failed as a whole: fail the answers that took part in it."""
        self.context.free_memory()
        for request in self.scheduler.drop_running():
            self._fail(request, error)

    def _start(self, request: EngineRequest) -> Sequence | None:
        """Open a sequence for an admitted request; on failure, deliver the error to the request and return None."""
        session: CacheSession | None = None
        try:
            session = CacheSession(None) if request.guess else self._open_session(request)
            return Sequence(request, self.context, self.scheduler.allocate(request), session)
        except Exception as error:
            if is_device_error(error):
                raise
            if session is not None:
                session.close(clean=False)
            self._fail(request, error)
            return None

    def _finish(self, sequence: Sequence, outcome: Outcome) -> None:
        """Deliver a step's outcome. A finished sequence is removed before its last delta is delivered, so that the
        client's next request already finds its KV slots in the prefix cache.
        """
        if isinstance(outcome, Exception):
            self.scheduler.remove(sequence, clean=False)
            self._fail(sequence.request, outcome)
            return
        if outcome is not None and sequence.request.shares_prompt:  # with the other choices of the same request
            sequence.request.shares_prompt = False
            self.scheduler.keep(sequence, len(sequence.request.prompt))
        if sequence.finished:
            self.scheduler.remove(sequence, clean=True)
        if outcome is not None:
            sequence.request.deliver(outcome)

    def _fail(self, request: EngineRequest, error: Exception) -> None:
        self.scheduler.forget(request)
        self.context.counters.failed += not request.guess
        if not isinstance(error, AgentSpecError):
            logger.error("a request failed: %s", error_location(error))
            reason = ""
            if is_out_of_memory(error):
                self.scheduler.prefix_cache.clear()
                reason = ": out of memory"
            cause, error = error, EngineError(f"the engine failed on this request{reason}")
            error.__cause__ = cause
        request.deliver(error)

    def _end(self, error: AgentSpecError) -> None:
        try:
            unfinished = self.scheduler.clear()
            self._thread.remove(self)
            for request in unfinished:
                request.deliver(error)
        finally:
            self._ended.set()


Outcome = Delta | Exception | None


def run_step(scheduled: list[ScheduledSequence], context: EngineContext) -> list[tuple[Sequence, Outcome]]:
    """Run one step and return each sequence's outcome: a delta, None while it reads its prompt, or its own error."""
    if not scheduled:
        return []
    device = context.target.device
    drawing = [each for each in scheduled if each.draws]
    context.drawing = len(drawing)
    for each in drawing:
        isolate_failure(each, each.propose)
    cost = allocate_draft_budget(scheduled, context.governor)
    synchronize(device)  # else this step would be charged for KV slots that an earlier step is still moving
    tokens, past, started = sum(len(each.batch_item) for each in scheduled), kv_length(scheduled), perf_counter()
    batched = run(scheduled, context)
    if not any(each.draws for each in scheduled):
        synchronize(device)  # without a draw nothing waits for the forward, and the step would seem to cost nothing
    draw(scheduled)
    context.counters.batch_sizes[len(scheduled)] += 1
    deltas = [isolate_failure(each, partial(each.commit, cost)) for each in scheduled]
    if batched:  # the time includes sampling, which on a CUDA device is what waits for the forward
        context.governor.cost.observe(tokens, past, perf_counter() - started, len(scheduled))
    return [(each.sequence, each.error or delta) for each, delta in zip(scheduled, deltas, strict=True)]


def allocate_draft_budget(scheduled: list[ScheduledSequence], governor: Governor) -> StepEstimate:
    """Trim all proposals to the nodes that pay for the step as a whole, and estimate what the step costs."""
    drawing = [each for each in scheduled if each.draws and each.error is None]
    tokens, past, batch = sum(each.num_tokens for each in scheduled), kv_length(scheduled), len(scheduled)
    plain = governor.cost.seconds(tokens, past, batch)
    if not any(len(each.proposal) for each in drawing):
        return StepEstimate(plain, 0.0, plain / max(1, len(drawing)))
    acceptances = [each.proposal.acceptance for each in drawing]
    chosen = governor.choose(acceptances, tokens=tokens, context=past, batch=batch)
    for each, nodes in zip(drawing, chosen, strict=True):
        each.proposal = subtree(each.proposal, depth_first(each.proposal, nodes))
    drafted = sum(len(each.proposal) for each in drawing)
    drafts = governor.cost.seconds(tokens + drafted, past, batch) - plain
    alone = governor.cost.seconds(len(drawing), past, len(drawing))
    return StepEstimate(plain, drafts, alone / len(drawing))


def run(scheduled: list[ScheduledSequence], context: EngineContext) -> bool:
    """Run the forward and return whether all sequences shared one. If it fails, run each sequence alone, so that only
    those that fail again get an error.
    """
    sound = [each for each in scheduled if each.error is None]
    if not sound:
        return False
    try:
        run_forward(sound, context.target)
        return len(sound) == len(scheduled) and (len(scheduled) == 1 or context.target.batched)
    except Exception as error:
        if is_device_error(error):
            raise
        logger.warning("a step of %d answers failed, each is tried alone: %s", len(sound), error_location(error))
    context.free_memory()  # only now: until here the exception kept the forward's tensors alive
    for each in sound:
        isolate_failure(each, partial(run_forward, [each], context.target))
    return False


def run_forward(scheduled: list[ScheduledSequence], target: TargetModel) -> None:
    """Compute the logits of all sequences in one forward."""
    items = [each.batch_item for each in scheduled]
    for each, logits in zip(scheduled, target.forward_batch(items), strict=True):
        each.logits = logits


def draw(scheduled: list[ScheduledSequence]) -> None:
    """Draw all tokens that can be drawn before the commits on the device, and transfer them to the host at once.

    In between, while the device computes, the token cache learns.
    """
    for each in scheduled:
        if each.draws:
            isolate_failure(each, each.begin)
    for each in scheduled:
        each.sequence.flush_to_cache()
    fetch([each.sequence.sampler for each in scheduled if each.draws and each.error is None])


def isolate_failure(each: ScheduledSequence, action: Callable[[], T]) -> T | None:
    """Run `action` unless this sequence has failed before; store an exception in `each.error` instead of raising it.

    Raises errors of the device only: after them nothing more can be computed in this process.
    """
    if each.error is not None:
        return None
    try:
        return action()
    except Exception as error:
        if is_device_error(error):
            raise
        each.fail(error)
        return None
