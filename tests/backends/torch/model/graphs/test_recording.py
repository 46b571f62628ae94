"""Recorded forwards compute what launched ones do. Here a tape stands in for CUDA graphs, with their limits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentspec.backends.torch.loader import prepare
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.graphs.recording import Graphs, record_graphs
from agentspec.backends.torch.model.target import TargetModel
from tests.backends.torch.conftest import laboratory, tiny
from tests.backends.torch.model.graphs import plain as plain

SIZES = (1, 2, 5, 12, 30)
TOLERANCE = 2e-4
GROUPED = ("gemma3", "gpt2", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3")
OFTEN = ("gemma3", "gpt2", "llama", "qwen2_moe")  # sliding windows, learned positions, neither, and experts
READS = ("aten.item", "aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero", "aten.equal")


class Tape(TorchDispatchMode):
    """The operations between `begin` and `end`; `replay` does them again and leaves each result where it was."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def begin(self) -> None:
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        for operation, args, kwargs, outputs in self._operations:
            again = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(outputs), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(READS):
            raise RuntimeError(f"{func} waits for a value, which cannot be recorded")
        outputs = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, outputs))
        return outputs


class TapeRecorder:
    """Makes tapes; `tapes` are all there are."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def graph(self) -> Tape:
        self.tapes.append(Tape())
        return self.tapes[-1]

    def require_free(self, work: Callable[[], object]) -> None:
        work()


@pytest.fixture(
    scope="module", params=[name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in GROUPED]
)
def recorded(request: pytest.FixtureRequest) -> tuple[TargetModel, TargetModel]:
    """A family's model as it is launched, and a twin that replays what was recorded."""
    target = laboratory(request.param).target
    twin = TargetModel(target.module)
    assert record_graphs(twin, TapeRecorder(), SIZES)
    return target, twin


def rows_of(target: TargetModel, tokens: Sequence[int]) -> Any:
    rows = target.new_cache(1)
    if tokens:
        target.prefill(rows, tokens)
    return rows


def require_same(recorded: tuple[TargetModel, TargetModel], parts: Sequence[Any], wanted: Sequence[bool]) -> None:
    """Compare forwards over several sequences: tokens before, new ones, those of a tree and their parents."""
    outputs = []
    for target in recorded:
        rows = [rows_of(target, before) for before, *_ in parts]
        items = [BatchItem(r, c, t, p, needs_logits=w) for r, (_, c, t, p), w in zip(rows, parts, wanted, strict=True)]
        outputs.append(target.forward_batch(items))
    for launched, replayed in zip(*outputs, strict=True):
        assert launched.shape == replayed.shape and replayed.dtype == torch.float32
        assert launched.numel() == 0 or (launched - replayed).abs().max() < TOLERANCE


@given(data=st.data())
def test_replayed_logits_are_launched_ones(recorded: tuple[TargetModel, TargetModel], data: st.DataObject) -> None:
    token = st.integers(0, 258)
    parts = []
    for _ in range(data.draw(st.integers(1, 3))):
        before = data.draw(st.lists(token, max_size=12))
        chain = data.draw(st.lists(token, min_size=1, max_size=5))
        tokens = data.draw(st.lists(token, max_size=5))
        parts.append((before, chain, tokens, [data.draw(st.integers(-1, node - 1)) for node in range(len(tokens))]))
    require_same(recorded, parts, [data.draw(st.booleans()) for _ in parts])


def test_rows_after_a_replay_are_those_of_a_launch(recorded: tuple[TargetModel, TargetModel]) -> None:
    _, target = recorded
    assert target.graphs is not None
    before, rows = target.graphs.replays, target.new_cache(1)
    target.forward(rows, [1, 2, 3], [9, 4, 5, 8, 6], [-1, -1, 1, 0, 2])
    rows.commit(3, [1, 2, 4])
    first = target.forward(rows, [7])
    assert target.graphs.replays == before + 2
    launched = recorded[0]
    again = rows_of(launched, [1, 2, 3, 4, 5, 6])
    assert (first - launched.forward(again, [7])).abs().max() < TOLERANCE
    later = first.clone()
    target.forward(rows, [8])
    assert torch.equal(first, later)  # what was returned does not change with the next replay
    logits = target.forward(target.new_cache(1), range(31))
    assert target.graphs.replays == before + 3, "what is larger than any recording is launched"
    assert (logits - launched.forward(launched.new_cache(1), range(31))).abs().max() < TOLERANCE


# function or method, what to change, changed
MUTATIONS = {
    "positions as they were recorded": ("table[POSITIONS, at:end] = cache.length + layout.depths", "pass"),
    "tokens as they were recorded": ("table[IDS, at:end] = (*item.tokens, *item.draft_tokens)", "pass"),
    "committed slots left out": ("(at, len(layout), cache.length)", "(at, len(layout), 0)"),
    "all new tokens seen": ("_bits(layout.sees)", "-1"),
    "slots of the first sequence": ("table[LAYERS:, number]", "table[LAYERS:, 0]"),
}
MUTATIONS = {name: ("StepTable.fill", *change) for name, change in MUTATIONS.items()} | {
    "one layer's slots for all": (
        "SequenceCache.addresses", "for k, v in pairs", "for k, v in pairs[:1] * len(pairs)"
    ),
    "a size too small": ("Graphs.replay", "bisect_left(self.sizes, tokens)", "0"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_finds_its_place(name: str, mutate: Any) -> None:
    mutate(*MUTATIONS[name])


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_guard_is_caught(recorded: tuple[TargetModel, TargetModel], name: str, mutate: Any) -> None:
    parts = [([], [5, 3, 8], [1, 2, 3], [-1, -1, 0]), ([*range(12)], [7], [4, 9], [-1, 0])]
    require_same(recorded, parts, [True, True])
    mutate(*MUTATIONS[name])
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        require_same(recorded, parts, [True, True])


@pytest.mark.usefixtures("split_sums")
@pytest.mark.parametrize("mistake", [None, "tokens as they were recorded", "committed slots left out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_drops_no_recording_and_a_mistake_does(
    byte_tokens: Any, mutate: Any, dtype: torch.dtype, mistake: str | None
) -> None:
    target = prepare(tiny("llama").to(dtype), byte_tokens, name="m", fingerprint="f").target
    if mistake is not None:
        mutate(*MUTATIONS[mistake])
    assert record_graphs(target, TapeRecorder(), SIZES) is (mistake is None)


class Odd(torch.nn.Module):
    """The head of a model, followed by something odd."""

    def __init__(self, head: Any, odd: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.weight, self._head, self._odd = head.weight, [head], odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._head[0](x)
        return out + self._odd(x)


def recording(_: Any = None) -> bool:
    return isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), Tape)


@pytest.mark.parametrize(
    ("odd", "says"), [(lambda x: 0.0 * float(x.sum()), "cannot be recorded"), (recording, "is off by")]
)
def test_a_model_that_cannot_be_recorded_is_launched(
    byte_tokens: Any, odd: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads values from the device, or its result depends on what Python knew when it was recorded."""
    target = prepare(tiny("llama"), byte_tokens, name="odd", fingerprint="odd").target
    target.module.set_output_embeddings(Odd(target.module.get_output_embeddings(), odd))
    with caplog.at_level(logging.WARNING):
        assert not record_graphs(target, TapeRecorder(), SIZES)
    assert target.graphs is None and says in caplog.text
    assert target.forward(target.new_cache(1), [1, 2]).isfinite().all() and not recording()


class Breaks(TapeRecorder):
    """Cannot begin its third graph, as where memory is short."""

    def graph(self) -> Tape:
        if len(self.tapes) == 2:
            raise MemoryError("no room")
        return super().graph()


def test_a_recording_that_fails_leaves_the_model_as_it_was(byte_tokens: Any) -> None:
    target = prepare(tiny("gpt2"), byte_tokens, name="tiny", fingerprint="f").target
    assert not record_graphs(target) and target.graphs is None, "it is on no CUDA device"
    assert not record_graphs(target, Breaks(), SIZES) and target.graphs is None and not recording()
    target.context_length = 12  # a token comes before those of the forward that is compared
    assert record_graphs(target, TapeRecorder(), SIZES) and target.graphs is not None
    assert target.graphs.sizes == (1, 2, 5)
    target.context_length = 1
    assert not record_graphs(target, TapeRecorder(), SIZES)
    alone = prepare(tiny("gemma2"), byte_tokens, name="tiny", fingerprint="f").target
    assert not record_graphs(alone, TapeRecorder(), SIZES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: recording real CUDA graphs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_compute_the_same(byte_tokens: Any, dtype: torch.dtype) -> None:
    module = tiny("llama").to("cuda", dtype)
    target = prepare(module, byte_tokens, name="tiny", fingerprint="f").target
    assert record_graphs(target) and isinstance(target.graphs, Graphs)
    for size in (1, 3, 40, 128):
        assert target.forward(target.new_cache(1), [1] * size).isfinite().all()
    assert target.graphs.replays >= 4
