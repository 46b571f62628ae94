from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache import CacheRequest, SuffixCache
from agentspec.cache.index import ExtendJob, IndexDrafter, SuffixIndex, extend_batch, propose_batch
from agentspec.cache.tokens import EMPTY
from agentspec.errors import CacheClosedError, InvalidRequestError
from agentspec.types import Draft, Source


@pytest.fixture
def cache() -> Iterator[SuffixCache]:
    with SuffixCache.open() as cache:
        yield cache


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
        together = cache.draft_batch(requests, budgets, min_probability)
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


def test_one_budget_is_for_all(cache: SuffixCache) -> None:
    requests = [cache.request([1, 2, 3, 1, 2], session=str(number)) for number in range(3)]
    assert [len(draft) for draft in cache.draft_batch(requests, 2)] == [2, 2, 2]
    assert [len(draft) for draft in cache.draft_batch(requests, np.array([0, 1, 2]))] == [0, 1, 2]
    assert cache.draft_batch([]) == []


def test_acceptance_of_a_batch_is_counted(cache: SuffixCache) -> None:
    with cache.request([1, 2, 3, 4, 5, 1, 2]) as request:
        (draft,) = cache.draft_batch([request], 3)
        assert draft.tokens.tolist() == [3, 4, 5]
        request.extend([3, 4, 9])
    assert (cache.stats().steps, cache.stats().drafted, cache.stats().accepted) == (1, 3, 2)


def test_bad_batches(cache: SuffixCache) -> None:
    def requests(count: int = 2) -> list[CacheRequest]:
        return [cache.request([1, 2, 1], session=str(number)) for number in range(count)]

    for budgets in ([1], [1, 2, 3], -1, [1, -1], True, 1.5, "12"):
        with pytest.raises(InvalidRequestError) as caught:
            cache.draft_batch(requests(), budgets)  # type: ignore[arg-type]
        assert caught.value.param == "max_tokens"
    with pytest.raises(InvalidRequestError) as caught:
        cache.draft_batch(requests(), min_probability=2.0)
    assert caught.value.param == "min_probability"


def test_an_index_given_twice_fails_the_batch(cache: SuffixCache) -> None:
    good, bad = cache.request([1, 2, 1], session="a"), cache.request([1, 2, 1], session="b")
    bad.include(bad.indexes[0][0], Source.PREDICTION)
    with pytest.raises(InvalidRequestError, match="twice"):
        cache.draft_batch([good, bad])


def test_requests_that_cannot_be_drafted_for(cache: SuffixCache) -> None:
    closed, good = cache.request([1, 2, 1]), cache.request([1, 2, 1])
    closed.close()
    with pytest.raises(CacheClosedError):
        cache.draft_batch([good, closed])
    with SuffixCache.open() as other, pytest.raises(InvalidRequestError, match="another cache"):
        cache.draft_batch([good, other.request([1])])
    with pytest.raises(CacheClosedError):
        other.draft_batch([])


@given(
    texts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=60), min_size=1, max_size=12),
    shared=st.lists(st.integers(0, 4), max_size=200),
)
def test_a_batch_of_extensions_is_as_one_after_the_other(texts: list[list[int]], shared: list[int]) -> None:
    arrays = [np.array(text, np.int32) for text in texts]

    def work(*, batch: bool) -> tuple[IndexDrafter, list[SuffixIndex]]:
        drafter, past, sessions = IndexDrafter(), SuffixIndex(), [SuffixIndex() for _ in texts]
        past.append(0, shared)
        jobs: list[ExtendJob] = []
        for index, text in zip(sessions, arrays, strict=True):
            index.append(0, text[:20])
            searched = [(index, Source.SESSION), (past, Source.SHARED)]
            jobs.append((drafter, searched, text[:20], text[20:], index, 0, EMPTY))
        ends: list[ExtendJob] = [(None, [], EMPTY, text, past, 1 + n, text[:3]) for n, text in enumerate(arrays)]
        for part in (jobs, ends):
            for some in [part] if batch else [[job] for job in part]:
                extend_batch(some)
        return drafter, [*sessions, past]

    (one, indexes), (other, others) = work(batch=True), work(batch=False)
    assert one.state().tolist() == other.state().tolist()
    for index, twin in zip(indexes, others, strict=True):
        index.check_integrity()
        numbers = index.usage().sequences.tolist()
        assert [index.tokens(n).tolist() for n in numbers] == [twin.tokens(n).tolist() for n in numbers]
        assert index.usage().hits.tolist() == twin.usage().hits.tolist()


def test_a_bad_batch_of_extensions_changes_nothing() -> None:
    drafter, index, tokens = IndexDrafter(), SuffixIndex(), np.array([1, 2], np.int32)
    good: ExtendJob = (drafter, [(index, 0)], tokens, tokens, index, 0, EMPTY)
    with pytest.raises(InvalidRequestError, match="source"):
        extend_batch([good, (drafter, [(index, 7)], tokens, tokens, index, 1, EMPTY)])
    assert index.sequence_count == 0
    extend_batch([good])
    assert index.tokens(0).tolist() == [1, 2]


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
