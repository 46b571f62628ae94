from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache import SuffixCache
from agentspec.cache.index import IndexDrafter, SuffixIndex, propose_batch
from agentspec.types import Draft, Source


def same(one: Draft, other: Draft) -> bool:
    fields = ("tokens", "parents", "probabilities", "match_length", "source")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in fields)


@given(
    outputs=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=60), max_size=4),
    prompts=st.lists(st.lists(st.integers(0, 4), max_size=80), max_size=24),
    budgets=st.lists(st.integers(0, 80), min_size=24, max_size=24),
    min_probability=st.sampled_from([0.0, 0.01, 0.3]),
    namespaces=st.booleans(),
)
def test_a_batch_drafts_what_each_request_would(
    outputs: list[list[int]], prompts: list[list[int]], budgets: list[int], min_probability: float, namespaces: bool
) -> None:
    with SuffixCache.open() as cache:
        for output in outputs:
            with cache.request([7]) as request:
                request.extend(output)
        requests = [
            cache.request(prompt, session=str(number), namespace=str(number % 3) if namespaces else None)
            for number, prompt in enumerate(prompts)
        ]
        budgets = budgets[: len(prompts)]
        alone = [r.draft(budget, min_probability) for r, budget in zip(requests, budgets, strict=True)]
        jobs = [r.job(budget, min_probability) for r, budget in zip(requests, budgets, strict=True)]
        together = propose_batch(jobs)
        assert len(together) == len(requests)
        assert all(same(one, other) for one, other in zip(alone, together, strict=True))


def test_many_threads_draft_as_one() -> None:
    """More than any machine's share of tokens for each of several threads, beside a thread that appends."""
    rng = np.random.default_rng(0)
    index, drafter = SuffixIndex(), IndexDrafter()
    index.append(0, rng.integers(0, 20, 20_000).astype(np.int32))
    contexts = [rng.integers(0, 20, 64).astype(np.int32) for _ in range(200)]
    alone = [drafter.draft([(index, Source.SHARED)], context, 64) for context in contexts]
    together = propose_batch([(drafter, [(index, Source.SHARED)], context, 64, 0.0, False) for context in contexts])
    assert sum(map(len, together)) > 5000
    assert all(same(one, other) for one, other in zip(alone, together, strict=True))


def test_drafting_goes_on_while_others_forget() -> None:
    """No draft is left out or cut: forgetting keeps nobody waiting."""
    index, text = SuffixIndex(), np.arange(1, 1001, dtype=np.int32)
    for sequence in range(1000):
        index.append(sequence, text)
    job = (IndexDrafter(), [(index, Source.SHARED)], text[:20], 8, 0.0, False)
    forgetting = threading.Thread(target=index.remove, args=(np.arange(0, 1000, 2),))
    forgetting.start()
    lengths = []
    while forgetting.is_alive():
        lengths.append(len(propose_batch([job])[0]))
    assert set(lengths) <= {8}
    assert len(propose_batch([job])[0]) == 8


def test_a_draft_is_cut_when_patience_ends() -> None:
    index, text = SuffixIndex(), np.arange(1, 1001, dtype=np.int32)
    index.append(0, text)
    job = (IndexDrafter(), [(index, Source.SHARED)], text[:20], 8, 0.0, False)
    whole, cut = propose_batch([job], 1e6)[0], propose_batch([job], 0.0)[0]
    assert (len(whole), len(cut)) == (8, 0)
