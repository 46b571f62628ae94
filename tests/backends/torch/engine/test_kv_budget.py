"""Memory for key/value rows: counted before it is taken."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentspec.backends.torch.engine import kv_memory
from agentspec.backends.torch.engine.kv_budget import ROOM, KVBudget
from agentspec.backends.torch.engine.kv_memory import DEFAULT_BYTES, available, budget_of, promise, release
from agentspec.backends.torch.engine.sequence import EngineContext
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.errors import ConfigurationError, ContextLengthError, OverloadedError
from agentspec.types import SamplingParams


def begun(lab: Any, ask_of: Any, prompt: int, max_tokens: int, capacity: int = 1) -> Any:
    shared = EngineContext(lab.target, lab.tokenizer)
    ask = ask_of([5] * prompt, SamplingParams(temperature=0), max_tokens=max_tokens)
    return ask.begin(shared, SequenceCache(capacity))


def test_what_never_fits_is_refused_with_what_to_change(lab: Any, ask_of: Any) -> None:
    sequence = begun(lab, ask_of, 20, 30)
    KVBudget(20 + 30 + ROOM, 1 << 20).check(sequence.request)
    with pytest.raises(ContextLengthError, match="kv_bytes allows 113: ask for fewer tokens or raise kv_bytes"):
        KVBudget(20 + 30 + ROOM - 1, 1 << 20).check(sequence.request)


def test_growing_takes_what_is_free_and_no_more(lab: Any, ask_of: Any) -> None:
    one, two = begun(lab, ask_of, 40, 5000, 100), begun(lab, ask_of, 40, 5000, 100)
    both, least = [one, two], 40 + ROOM
    assert KVBudget(1000).grow(one, both) and one.kv_cache.capacity == 150
    assert KVBudget(1000).grow(one, both) and one.kv_cache.capacity == 150  # enough for now
    assert KVBudget(150 + least).grow(two, both) and two.kv_cache.capacity == least
    two.kv_cache.capacity = 100
    assert not KVBudget(150 + least - 1).grow(two, both)
    assert KVBudget(0).used(both) == one.kv_cache.capacity + two.kv_cache.capacity


def test_what_is_lent_is_not_there_for_answers_until_it_is_given_back(lab: Any, ask_of: Any) -> None:
    one = begun(lab, ask_of, 40, 5000, 100)
    budget = KVBudget(250, 8)
    give_back = budget.lend(100, [one])
    assert budget.used([one]) == 200 and budget.idle_bytes([one]) == 400
    assert not budget.fits(51, [one])
    with pytest.raises(OverloadedError):
        budget.lend(51, [one])
    with pytest.raises(ContextLengthError):
        budget.lend(251, [])
    give_back()
    give_back()
    assert budget.used([one]) == 100 and budget.fits(150, [one])


GPU = torch.device("cuda:0")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Says how many bytes are free on every device, of which none is promised yet."""
    monkeypatch.setattr(kv_memory, "_PROMISED", weakref.WeakSet())
    return lambda bytes: monkeypatch.setattr(kv_memory, "free_memory", lambda device: bytes)


def test_two_engines_on_one_device_are_not_promised_the_same_memory(free: Any) -> None:
    free(1000)
    first, second = (KVBudget(0, device=GPU) for _ in range(2))
    third, used = KVBudget(0, device=torch.device("cuda:1")), [0]
    first.allocated = lambda: used[0]
    assert [promise(one, None) for one in (first, second, third)] == [800, 160, 800]
    release(second)
    release(second)
    assert available(GPU) == 200
    used[0] = 500  # these bytes are not free any more
    assert available(GPU) == 700
    del first
    assert available(GPU) == 1000


@pytest.mark.parametrize(("bytes", "share"), [(1000, 500), (1 << 60, DEFAULT_BYTES), (None, DEFAULT_BYTES)])
def test_the_share_of_a_cpu_leaves_others_their_half(free: Any, bytes: int | None, share: int) -> None:
    free(bytes)
    assert promise(KVBudget(0), None) == share


def test_more_than_is_free_is_granted_with_a_warning(free: Any, caplog: pytest.LogCaptureFixture) -> None:
    free(1 << 20)
    assert promise(KVBudget(0, device=GPU), 3 << 20) == 3 << 20
    assert "kv_bytes promises 3 MiB of cuda:0, of which 1 MiB are free" in caplog.text


def test_a_device_without_memory_is_an_error_of_the_configuration(lab: Any, free: Any) -> None:
    free(256)
    with pytest.raises(ConfigurationError, match="set kv_bytes") as caught:
        budget_of(lab.target, None)
    assert caught.value.param == "kv_bytes"


def test_the_garbage_collector_may_give_back_while_another_lends() -> None:
    budget = KVBudget(100)
    give_back = budget.lend(10, [])
    done = threading.Event()

    def collected() -> None:
        with budget._lock:  # as in `lend`, in the middle of which a finalizer runs
            give_back()
        done.set()

    threading.Thread(target=collected, daemon=True).start()
    assert done.wait(10) and budget.lent == 0
