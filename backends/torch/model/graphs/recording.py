"""Captures forwards once and replays them: all their kernels are launched at once, as a CUDA graph.

A forward of few tokens is little work for a GPU, but much for the CPU that launches its hundreds of kernels. A captured
forward has a fixed number of tokens and fixed memory addresses, so other forwards are padded to the next captured size,
and attention finds the KV slots of its sequences in a table.
"""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentspec.backends.torch.model.device import is_device_error
from agentspec.backends.torch.model.graphs.attention import RecordedCache
from agentspec.backends.torch.model.graphs.step_table import StepTable
from agentspec.backends.torch.model.self_check import allowed_difference, relative_difference
from agentspec.telemetry.safe_errors import safe_message

if TYPE_CHECKING:
    from agentspec.backends.torch.model.batch import BatchItem
    from agentspec.backends.torch.model.target import TargetModel

logger = logging.getLogger(__name__)

WAITS = "called a synchronizing CUDA operation"
_RECORDING = threading.Lock()  # torch records one graph at a time
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # tokens of the captured forwards


class NotRecordable(Exception):
    """A forward cannot be replayed; the message says why."""


class CudaGraphRecorder:
    """Makes CUDA graphs that share one memory pool, and must be captured inside `session`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Provide what capturing needs: a stream of its own, no other recording, and no garbage freed at that time."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with _RECORDING:
            gc.collect()
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(stream):
                yield
            torch.cuda.synchronize(self._device)

    def graph(self) -> CudaGraph:
        return CudaGraph(self._pool)

    def require_free(self, work: Callable[[], object]) -> None:
        """Raise `NotRecordable` if `work` makes the host wait: a capture that fails half-way would corrupt the
        allocator's state.
        """
        if waits := count_host_syncs(work):
            raise NotRecordable(f"the host waits {waits} times for the device in the middle")


class CudaGraph:
    """Records the device's work between `begin` and `end`; `replay` repeats it at the same memory addresses."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def begin(self) -> None:
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:  # raised before the allocator ends its part of the recording
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise

    def replay(self) -> None:
        self._graph.replay()


class CapturedForward:
    """A forward of `size` tokens: one graph, and fixed memory for what its tokens are and for its logits.

    All captured forwards share `logits` [most, vocab] in float32, since only one is replayed at a time.
    """

    def __init__(
        self, module: Any, size: int, windows: Sequence[int | None], recorder: CudaGraphRecorder, logits: Tensor
    ) -> None:
        self._module, self._windows, self._logits = module, windows, logits[:size]
        self._table = StepTable(len(windows), size, logits.device)
        self._run()  # compiles kernels, which cannot be done in a capture
        self._graph = recorder.graph()
        self._graph.begin()
        try:
            self._like = self._run()
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self._graph.end()
            raise
        self._graph.end()

    def replay(self, items: Sequence[BatchItem]) -> Tensor:
        """The logits [size, vocab] of packed tokens, including rows for the padding; valid until the next replay."""
        self._table.fill(items, self._like)
        self._graph.replay()
        return self._logits

    def _run(self) -> list[tuple[Tensor, Tensor]]:
        """Compute the logits of what stands in the table; returns each layer's new keys and values."""
        cache = RecordedCache(self._table, self._windows)
        where = {"input_ids": self._table.ids, "position_ids": self._table.positions, "past_key_values": cache}
        self._logits.copy_(self._module(**where, use_cache=True, logits_to_keep=0).logits[0])
        return cache.like


class Graphs:
    """One model's captured forwards, by their number of tokens. `replays` counts the forwards they served."""

    def __init__(self, target: TargetModel, recorder: CudaGraphRecorder, sizes: Sequence[int] = SIZES) -> None:
        logits = torch.zeros(max(sizes), target.vocab_size, device=target.device)
        self.sizes = tuple(sorted(sizes))
        with recorder.session():
            self._captured = {
                size: CapturedForward(target.module, size, target.layer_windows, recorder, logits)
                for size in self.sizes[::-1]
            }
        self.replays = 0

    def fits(self, tokens: int) -> bool:
        return tokens <= self.sizes[-1]

    def replay(self, items: Sequence[BatchItem]) -> Tensor:
        """The logits [tokens or more, vocab] in float32 of packed tokens that fit; valid until the next replay."""
        self.replays += 1
        tokens = sum(map(len, items))
        return self._captured[self.sizes[bisect_left(self.sizes, tokens)]].replay(items)


@torch.inference_mode()
def record_graphs(target: TargetModel, recorder: CudaGraphRecorder | None = None, sizes: Sequence[int] = SIZES) -> bool:
    """Let `target` replay forwards of up to max(`sizes`) tokens if that computes the same; returns whether it does.

    A model that cannot be recorded (such as a mixture of experts that reads values from the device half-way) runs as
    before, with a warning in the log. `recorder` defaults to CUDA's; without one, only a CUDA device is recorded.
    """
    sizes = [size for size in sizes if size < target.context_length]  # they come after one token
    if not (target.batched and sizes) or (recorder is None and target.device.type != "cuda"):
        return False
    try:
        _record(target, recorder or CudaGraphRecorder(target.device), sizes)
    except Exception as error:
        if is_device_error(error):
            raise
        target.graphs = None
        reason = str(error) if isinstance(error, NotRecordable) else safe_message(error)
        logger.warning("forwards cannot be recorded and are launched kernel by kernel: %s", reason)
        return False
    return True


def _record(target: TargetModel, recorder: CudaGraphRecorder, sizes: Sequence[int]) -> None:
    """Capture forwards and compare their logits with launched ones: of the captured sizes, and of smaller sizes, which
    are padded, in an order not sorted by size. How much rounding changes is seen from launched forwards of other sizes.
    """
    tried = [*sizes, *(max(1, size - 1) for size in (*sizes[1::2], *sizes[::2]))]
    # Libraries initialise in their first calls, which must come before a capture.
    launched = _logits(target, tried)
    longest = max(launched, key=len)
    noise = max(relative_difference(rows, longest[: len(rows)]) for rows in launched)
    recorder.require_free(lambda: _logits(target, sizes))
    target.graphs = Graphs(target, recorder, sizes)
    for replayed, before in zip(_logits(target, tried), launched, strict=True):
        difference = relative_difference(replayed, before)
        if not difference <= allowed_difference(noise, target.dtype):
            raise NotRecordable(f"a recorded one is off by {difference:.2g} of the logits' spread")


def _logits(target: TargetModel, sizes: Sequence[int]) -> list[Tensor]:
    """The logits [size, vocab] of a forward for each size: one token after cached slots, then a draft chain."""
    rows = target.new_cache(max(sizes) + 1)
    target.prefill(rows, [0])
    ids = [token % target.vocab_size for token in range(1, max(sizes) + 1)]
    return [target.forward(rows, ids[:1], ids[1:size], range(-1, size - 2)) for size in sizes]


_COUNTING = threading.Lock()  # torch and Python have one mode and one list of warnings for the whole process


def count_host_syncs(work: Callable[[], object]) -> int:
    """How often the host waits for a CUDA device while this thread runs `work`, as far as torch reports it.

    The waits of other threads, such as another engine's, are not counted, and their other warnings are shown as usual.
    """
    own, waits = threading.get_ident(), 0
    with _COUNTING, warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning

        def hear(message: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal waits
            if WAITS not in str(message):
                show(message, *args, **kwargs)
            elif threading.get_ident() == own:
                waits += 1

        warnings.showwarning = hear
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return waits
