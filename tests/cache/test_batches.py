from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
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

    for budgets in ([1], [1, 2, 3], -1, [1, -1], True, 1.5, "12", np.array(-1), np.array([[1, 2], [3, 4]])):
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


# Requests of a cache, held to twins that are handled one by one in the same order.

TEXT = st.lists(st.integers(0, 4), max_size=70)
GROUPS = st.sampled_from([None, None, "one", "other"])


def columns(draft: Draft) -> list[object]:
    return [getattr(draft, name).tolist() for name in ("tokens", "parents", "probabilities", "match_length", "source")]


def state(cache: SuffixCache) -> list[object]:
    """All that drafts can depend on: what was learned, and the text and hits of the past outputs, by namespace."""
    found: list[object] = []
    for partition in cache._pool.namespaces.partitions():
        usage = partition.shared.usage()
        order = np.argsort(usage.sequences)
        numbers = usage.sequences[order].tolist()
        texts = [(partition.shared.prefix(n).tolist(), partition.shared.tokens(n).tolist()) for n in numbers]
        found.append((partition.namespace, partition.drafter.state().tolist(), texts, usage.hits[order].tolist()))
        found.append([one.index.tokens(0).tolist() for one in partition.sessions if one.index.sequence_count])
    return found


def requests_of(cache: SuffixCache, begun: list[tuple[list[int], int, str | None]]) -> list[CacheRequest]:
    return [
        cache.request(prompt, namespace=str(tenant), session=f"{group}{number}", group=group)
        for number, (prompt, tenant, group) in enumerate(begun)
    ]


@given(
    begun=st.lists(st.tuples(TEXT, st.integers(0, 1), GROUPS), min_size=1, max_size=6),
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 5), TEXT), max_size=6, unique_by=lambda step: step[0]), max_size=5
    ),
    closed=st.permutations(range(6)),
    learn=st.booleans(),
)
@example(  # the second learns from what the first has put out in the same step
    begun=[([1], 0, "one"), ([1], 0, "one")],
    steps=[[(0, [2, 3, 4, 2, 3, 4]), (1, [2, 3, 4, 2, 3, 4])], [(1, [2, 3]), (0, [2, 3, 4])]],
    closed=[1, 0, 2, 3, 4, 5],
    learn=True,
)
def test_batches_do_what_single_calls_in_the_same_order_do(
    begun: list[tuple[list[int], int, str | None]],
    steps: list[list[tuple[int, list[int]]]],
    closed: list[int],
    learn: bool,
) -> None:
    with SuffixCache.open() as alone, SuffixCache.open() as together:
        ones, others = requests_of(alone, begun), requests_of(together, begun)
        for step in steps:
            chosen = [(number, tokens) for number, tokens in step if number < len(begun)]
            drafts = [ones[number].draft(8) for number, _ in chosen]
            batch = together.draft_batch([others[number] for number, _ in chosen], 8)
            assert [columns(draft) for draft in drafts] == [columns(draft) for draft in batch]
            for number, tokens in chosen:
                ones[number].extend(tokens, learn=learn)
            together.extend_batch(
                [others[number] for number, _ in chosen], [tokens for _, tokens in chosen], learn=learn
            )
            assert [one.output.tolist() for one in ones] == [other.output.tolist() for other in others]
        order = [number for number in closed if number < len(begun)]
        for number in order:
            ones[number].close()
        together.close_batch([others[number] for number in order])
        assert state(alone) == state(together)
        one, other = alone.stats(), together.stats()
        for name in ("steps", "drafted", "accepted", "tokens", "memory_bytes"):
            assert getattr(one, name) == getattr(other, name)


def test_nothing_is_extended_where_a_batch_is_refused() -> None:
    with SuffixCache.open() as cache, SuffixCache.open() as foreign:
        one, two, closed, other = (of.request([1, 2]) for of in (cache, cache, cache, foreign))
        closed.close()
        with pytest.raises(InvalidRequestError, match="as many lists of tokens"):
            cache.extend_batch([one, two], [[1]])
        for no_list in (None, 7, ([token] for token in (1, 2))):
            with pytest.raises(InvalidRequestError, match="list of token lists"):
                cache.extend_batch([one, two], no_list)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="given twice"):
            cache.extend_batch([one, one], [[1], [2]])
        with pytest.raises(InvalidRequestError, match="another cache"):
            cache.extend_batch([one, other], [[1], [2]])
        with pytest.raises(InvalidRequestError, match="another cache"):
            cache.close_batch([one, other])
        with pytest.raises(InvalidRequestError, match="ids from 0"):
            cache.extend_batch([one, two], [[1], [-1]])
        with pytest.raises(CacheClosedError):
            cache.extend_batch([one, closed], [[1], [2]])
        assert len(one.output) == len(two.output) == 0
        cache.close_batch([one, closed, two])
        with pytest.raises(CacheClosedError):
            one.extend([1])
        assert cache.stats().sequences == 0  # nothing was put out


def test_a_batch_of_drafts_is_cut_when_patience_ends() -> None:
    with SuffixCache.open() as cache:
        requests = [cache.request([1, 2, 3, 1, 2]) for _ in range(3)]
        assert [len(draft) for draft in cache.draft_batch(requests, 2, patience=0)] == [0, 0, 0]
        assert [len(draft) for draft in cache.draft_batch(requests, 2, patience=60.0)] == [2, 2, 2]
        with pytest.raises(InvalidRequestError, match="patience"):
            cache.draft_batch(requests, 2, patience=-1)


def test_all_are_closed_where_one_fails() -> None:
    """The store refuses one output; the others are shared, and the budget is booked."""

    def fail_first(record: object, seen: list[object] = []) -> None:  # noqa: B006
        seen.append(record)
        if len(seen) == 1:
            raise OSError("full")

    with SuffixCache.open() as cache:
        cache._pool._persist = fail_first
        requests = [cache.request([1], session=str(number)) for number in range(3)]
        cache.extend_batch(requests, [[1, 2], [2, 3], [3, 4]])
        with pytest.raises(OSError, match="full"):
            cache.close_batch(requests)
        assert cache.stats().sequences == 3
        assert cache._pool.namespaces.partitions()[0].sessions.busy == 0
