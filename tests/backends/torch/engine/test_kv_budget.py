"""Memory for key/value rows: counted before it is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentspec.backends.torch.engine.kv_budget import AHEAD, DEFAULT_BYTES, ROOM, KVBudget, default_bytes, reserved
from agentspec.backends.torch.engine.sequence import EngineContext
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.model.target import TargetModel
from agentspec.errors import ContextLengthError
from agentspec.types import SamplingParams


def begun(lab: Any, ask_of: Any, prompt: int, max_tokens: int, capacity: int = 1) -> Any:
    shared = EngineContext(lab.target, lab.tokenizer)
    ask = ask_of([5] * prompt, SamplingParams(temperature=0), max_tokens=max_tokens)
    return ask.begin(shared, SequenceCache(capacity))


def test_a_row_is_measured(lab: Any) -> None:
    assert lab.target.slot_bytes() == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, float32
    assert KVBudget.of(lab.target, 256 * 20).limit == 20
    assert KVBudget.of(lab.target, None).limit == DEFAULT_BYTES // 256
    assert KVBudget.of(TargetModel(lab.target.module, rewindable=False), 1).limit is None


def test_what_never_fits_is_refused_with_what_to_change(lab: Any, ask_of: Any) -> None:
    sequence = begun(lab, ask_of, 20, 30)
    KVBudget(20 + 30 + ROOM, 1 << 20).check(sequence.request)
    KVBudget(None).check(sequence.request)
    with pytest.raises(ContextLengthError, match="kv_bytes allows 113: ask for fewer tokens or raise kv_bytes"):
        KVBudget(20 + 30 + ROOM - 1, 1 << 20).check(sequence.request)


def test_a_job_begins_with_its_prompt_and_some_room(lab: Any, ask_of: Any) -> None:
    budget = KVBudget(10_000)
    assert budget.initial(begun(lab, ask_of, 20, 30).request) == 20 + 30 + ROOM
    assert budget.initial(begun(lab, ask_of, 20, 5000).request) == 20 + AHEAD
    assert budget.initial(begun(lab, ask_of, 20, 5000).request, 900) == 900 + AHEAD


def test_growing_takes_what_is_free_and_no_more(lab: Any, ask_of: Any) -> None:
    one, two = begun(lab, ask_of, 40, 5000, 100), begun(lab, ask_of, 40, 5000, 100)
    both, least = [one, two], 40 + ROOM
    assert KVBudget(1000).grow(one, both) and one.kv_cache.capacity == 150
    assert KVBudget(1000).grow(one, both) and one.kv_cache.capacity == 150  # enough for now
    assert KVBudget(150 + least).grow(two, both) and two.kv_cache.capacity == least
    two.kv_cache.capacity = 100
    assert not KVBudget(150 + least - 1).grow(two, both)
    assert KVBudget(None).grow(two, both)
    assert KVBudget(0).used(both) == one.kv_cache.capacity + two.kv_cache.capacity


def test_rows_that_cannot_be_counted_are_not(lab: Any, ask_of: Any) -> None:
    sequence = begun(lab, ask_of, 4, 4)
    sequence.kv_cache = TargetModel(lab.target.module, rewindable=False).new_cache(1)
    assert reserved(sequence) == 0 and KVBudget(0).grow(sequence, [sequence])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gives_what_it_has_free() -> None:
    assert 0 < default_bytes(torch.device("cuda")) < torch.cuda.mem_get_info()[0]
