"""The engine runs one step after another; in each step all scheduled sequences share one forward."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.engine.cache_session import CacheSession
from agentspec.backends.torch.engine.compute_thread import compute_thread, stopped_by
from agentspec.backends.torch.engine.prefill.reader import PrefillReader
from agentspec.backends.torch.engine.request import EngineRequest
from agentspec.backends.torch.engine.scheduler import Scheduler
from agentspec.backends.torch.engine.sequence import EngineContext, Sequence
from agentspec.backends.torch.engine.step import Outcome, run_step
from agentspec.backends.torch.model.device import is_async_device, is_device_error, is_out_of_memory
from agentspec.cache.deletion import Reach
from agentspec.errors import AgentSpecError, EngineError, EngineStoppedError, ShuttingDownError
from agentspec.telemetry.safe_errors import error_location

logger = logging.getLogger(__name__)

JOIN_SECONDS = 60.0


class Engine:
    """Runs requests to their end. Any thread may call `submit`, `cancel` and `close`.

    The scheduler decides which sequences are computed. An error in one request is delivered to that request alone. Only
    an error of the device ends the engine: `failure` then says so, and every further request is refused with it.
    """

    def __init__(
        self, context: EngineContext, settings: TorchSettings, open_session: Callable[[EngineRequest], CacheSession]
    ) -> None:
        self.context = context
        self.scheduler = Scheduler(context, settings)
        context.free_memory = self.scheduler.prefix_cache.clear
        self._open_session = open_session
        self.failure: EngineStoppedError | None = None
        self._ended = threading.Event()
        self.prefills = PrefillReader(context, self.scheduler, self.device_failed)
        self._thread = compute_thread(context.target.device)
        self._thread.add(self)
        self._thread.add_idle(self.prefills)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises the errors of `Scheduler.add`, and `EngineStoppedError` once the device failed."""
        self.require_running()
        self.scheduler.add(request)
        self.prefills.queue.arrived(request.tenant, request.prompt)
        self._thread.wake()

    def prefill(self, tenant: str, tokens: list[int]) -> bool:
        """Read `tokens`, which begin a prompt that is expected, into slots that its request will find, while there is
        nothing else to do on the device. False if such slots are not kept. Any thread may call this.
        """
        if self.failure is not None or not self.prefills.add(tenant, tokens):
            return False
        self._thread.wake()
        return True

    def forget(self, reach: Reach) -> None:
        """Reuse nothing any more of what a deletion covers: neither KV slots nor what is read ahead.

        The memory is freed before the next step. Any thread may call this.
        """
        # First what is open is marked, then what is kept is to be looked through before the next step: what ends in
        # between is either marked or kept by then.
        self.scheduler.mark_forgotten(reach)
        self.prefills.queue.forget(reach)
        self.scheduler.prefix_cache.forget(reach)
        self._thread.wake()

    def cancel(self, request: EngineRequest) -> None:
        """Give the request's place to others now; its work ends before the next step. Nothing if it has finished."""
        if self.scheduler.cancel(request):
            self._thread.wake()

    def lend(self, slots: int) -> Callable[[], None]:
        """Set KV slots aside as `Scheduler.lend` does, and let what waits for them go on when they are given back."""
        self.prefills.pause()
        give_back = self.scheduler.lend(slots)

        def end() -> None:
            give_back()
            self._thread.wake()

        return end

    def require_running(self) -> None:
        """Raise `EngineStoppedError` once the device failed."""
        if self.failure is not None:
            raise EngineStoppedError(self.failure.message)

    def close(self) -> None:
        """Fail all running and waiting requests with `ShuttingDownError` and free the key/value memory. Idempotent."""
        self.scheduler.closed = True
        self._thread.wake()
        if not self._thread.current:
            self._ended.wait(JOIN_SECONDS)

    @property
    def ready(self) -> bool:
        return self.scheduler.closed or self.scheduler.has_work or self.scheduler.prefix_cache.forgets

    def turn(self) -> None:
        """Run one step. Only the computing thread may call this."""
        if self._ended.is_set():
            return
        try:
            if self.scheduler.closed:
                self._end(ShuttingDownError("the engine was shut down"))
                return
            if self.scheduler.prefix_cache.forgets:
                self.prefills.pause()
                self.scheduler.prefix_cache.shrink(None)
            if self.scheduler.has_work:
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
        self.prefills.pause()
        self.scheduler.remove_cancelled()
        schedule = self.scheduler.schedule(self._open)
        for sequence, outcome in run_step(schedule, self.context):
            try:
                self._finish(sequence, outcome)
            except Exception as error:
                self.scheduler.drop(sequence)
                self._fail(sequence.request, error)
                if is_device_error(error):
                    raise

    def _recover(self, error: Exception) -> None:
        """Go on after a step that failed as a whole: fail the answers that took part in it."""
        self.context.free_memory()
        for request in self.scheduler.drop_running():
            self._fail(request, error)

    def _open(self, request: EngineRequest) -> Sequence | None:
        """Open a sequence for an admitted request; on failure, deliver the error to the request and return None."""
        session: CacheSession | None = None
        try:
            session = self._open_session(request)
            kv_cache = self.scheduler.allocate(request, request.prompt)
            return Sequence(request, self.context, kv_cache, session)
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
        if outcome is not None and sequence.request.shares_prompt:
            self.scheduler.share_prompt(sequence)
        if sequence.finish is not None:
            self.scheduler.remove(sequence, clean=True)
        if outcome is not None:
            sequence.request.deliver(outcome)

    def _fail(self, request: EngineRequest, error: Exception) -> None:
        self.scheduler.forget(request)
        self.context.counters.failed += 1
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
            self.prefills.close()
            unfinished = self.scheduler.clear()
            self._thread.remove(self.prefills)
            self._thread.remove(self)
            for request in unfinished:
                request.deliver(error)
        finally:
            self._ended.set()
