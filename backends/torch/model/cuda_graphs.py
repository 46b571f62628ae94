"""Captures forwards once and replays them: all kernels between two attentions are launched at once, as a CUDA graph.

A forward of few tokens is little work for a GPU, but much for the CPU that launches its hundreds of kernels. A captured
forward has a fixed number of tokens and fixed memory addresses, so other forwards are padded to the next captured size.
Attention is not captured, since it reads KV slots that grow, of sequences that come and go: it runs as usual between
two graphs (piecewise CUDA graphs, as in vLLM).
"""

from __future__ import annotations

import gc
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from agentspec.backends.torch.model.batch import PackedCache
from agentspec.backends.torch.model.device import count_host_syncs, is_device_error, to_device
from agentspec.backends.torch.model.rounding import allowed_difference, relative_difference
from agentspec.telemetry.safe_errors import safe_message

if TYPE_CHECKING:
    from agentspec.backends.torch.model.target import TargetModel

logger = logging.getLogger(__name__)

_RECORDING = threading.Lock()  # torch records one graph at a time
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # tokens of the captured forwards


class GraphSegment(Protocol):
    """Records the device's work between `begin` and `end`; `replay` repeats it at the same memory addresses."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None: ...


class GraphRecorder(Protocol):
    """Makes segments, which must be captured inside `session` and replayed in the same order."""

    def session(self) -> AbstractContextManager[None]: ...

    def segment(self) -> GraphSegment: ...

    def require_free(self, work: Callable[[], object]) -> None:
        """Run `work` and raise `NotRecordable` if it does something that is known to be impossible to record."""
        ...


class NotRecordable(Exception):
    """A forward cannot be replayed; the message says why."""


class CudaGraphRecorder:
    """Makes segments that are CUDA graphs sharing one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Provide what capturing needs: a stream of its own, no other recording, and no garbage freed meanwhile."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with _RECORDING:
            gc.collect()
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(stream):
                yield
            torch.cuda.synchronize(self._device)

    def segment(self) -> GraphSegment:
        return CudaGraphSegment(self._pool)

    def require_free(self, work: Callable[[], object]) -> None:
        """Raise `NotRecordable` if `work` makes the host wait: a capture that fails half-way would corrupt the
        allocator's state.
        """
        if waits := count_host_syncs(work):
            raise NotRecordable(f"the host waits {waits} times for the device in the middle")


class CudaGraphSegment:
    """One CUDA graph."""

    def __init__(self, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def begin(self) -> None:
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:  # raised before the allocator was told that the recording is over
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise

    def replay(self) -> None:
        self._graph.replay()


@dataclass(frozen=True, slots=True)
class AttentionBreak:
    """An attention between two segments: the memory that holds its queries, keys and values [1, heads, size, d], and
    the memory for its result [1, size, heads, d].
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    result: Tensor
    scaling: float | None

    def fill(self, cache: PackedCache, tokens: int) -> None:
        """Compute the attention of the first `tokens` tokens; the result for the padding after them does not matter."""
        rows, _ = cache.update(self.key[:, :, :tokens], self.value[:, :, :tokens], self.layer)
        self.result[:, :tokens] = rows.attend(self.query[:, :, :tokens], self.scaling)


class CapturedForward:
    """A forward of `size` tokens: segments with attention between them, and fixed memory for inputs and logits.

    All captured forwards share `logits` [most, vocab] in float32, since only one is replayed at a time.
    """

    def __init__(self, module: Any, size: int, recorder: GraphRecorder, logits: Tensor) -> None:
        self.size = size
        self._recorder = recorder
        self._segments: list[GraphSegment] = []
        self._breaks: list[AttentionBreak] = []
        self._open = False
        self._inputs = torch.zeros(2, size, dtype=torch.long, device=logits.device)  # token ids and positions
        self._logits = logits[:size]
        self._record(module)

    def replay(self, ids: NDArray[np.int64], cache: PackedCache) -> Tensor:
        """The logits [size, vocab] of packed tokens, including rows for the padding; valid until the next replay."""
        tokens = len(ids)
        padded = np.zeros((2, self.size), dtype=np.int64)
        padded[:, :tokens] = ids, cache.positions
        self._inputs.copy_(to_device(padded, self._inputs.device))
        for segment, attention in zip(self._segments, self._breaks, strict=False):
            segment.replay()
            attention.fill(cache, tokens)
        self._segments[-1].replay()
        return self._logits

    @contextmanager
    def attention_break(self) -> Iterator[list[AttentionBreak]]:
        """End the current segment, and begin the next one when the `with` block ends."""
        self._end()
        yield self._breaks
        self._begin()

    def _record(self, module: Any) -> None:
        ids, positions = self._inputs[:1], self._inputs[1:]
        self._begin()
        try:
            where = {"input_ids": ids, "position_ids": positions, "past_key_values": AttentionBreakCache(self)}
            self._logits.copy_(module(**where, use_cache=True, logits_to_keep=0).logits[0])
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self._end()
            raise
        self._end()

    def _begin(self) -> None:
        self._segments.append(self._recorder.segment())
        self._segments[-1].begin()
        self._open = True

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._segments[-1].end()


class AttentionBreakCache(Cache):
    """Stands in for a model's cache while a forward is captured, and defers each attention."""

    def __init__(self, forward: CapturedForward) -> None:
        super().__init__(layers=[])
        self._forward = forward

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[DeferredAttention, DeferredAttention]:
        rows = DeferredAttention(self._forward, layer_idx, key_states, value_states)
        return rows, rows

    def __bool__(self) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class DeferredAttention:
    """A layer's new keys and values [1, kv_heads, size, d] in a forward that is being captured."""

    forward: CapturedForward
    layer: int
    key: Tensor
    value: Tensor

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        with self.forward.attention_break() as breaks:
            result = query.new_zeros(1, query.shape[2], query.shape[1], self.value.shape[-1])
            breaks.append(AttentionBreak(self.layer, query, self.key, self.value, result, scaling))
        return result


class Graphs:
    """One model's captured forwards, by their number of tokens. `replays` counts the forwards they served."""

    def __init__(self, module: Any, recorder: GraphRecorder, vocab_size: int, sizes: Sequence[int] = SIZES) -> None:
        logits = torch.zeros(max(sizes), vocab_size, device=module.device)
        with recorder.session():
            self._captured = {size: CapturedForward(module, size, recorder, logits) for size in sorted(sizes)[::-1]}
        self.sizes = tuple(sorted(sizes))
        self.replays = 0

    def fits(self, tokens: int) -> bool:
        return tokens <= self.sizes[-1]

    def replay(self, ids: NDArray[np.int64], cache: PackedCache) -> Tensor:
        """The logits [len(ids) or more, vocab] in float32 of packed tokens that fit; valid until the next replay."""
        self.replays += 1
        return self._captured[self.sizes[bisect_left(self.sizes, len(ids))]].replay(ids, cache)


@torch.inference_mode()
def record_graphs(target: TargetModel, recorder: GraphRecorder | None = None, sizes: Sequence[int] = SIZES) -> bool:
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


def _record(target: TargetModel, recorder: GraphRecorder, sizes: Sequence[int]) -> None:
    """Capture forwards and compare their logits with launched ones: of the captured sizes, and of smaller sizes, which
    are padded, in an order not sorted by size. How much rounding changes is seen from launched forwards of other sizes.
    """
    tried = [*sizes, *(max(1, size - 1) for size in (*sizes[1::2], *sizes[::2]))]
    # Libraries initialise in their first calls, which must come before a capture.
    launched = _logits(target, tried)
    longest = max(launched, key=len)
    noise = max(relative_difference(rows, longest[: len(rows)]) for rows in launched)
    recorder.require_free(lambda: _logits(target, sizes))
    target.graphs = Graphs(target.module, recorder, target.vocab_size, sizes)
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
