from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from agentspec.cache import SuffixCache
from agentspec.errors import InvalidRequestError
from agentspec.types import Source


@pytest.fixture
def cache() -> Iterator[SuffixCache]:
    with SuffixCache.open() as cache:
        yield cache
        cache.check_integrity()


def test_what_is_extended_is_drafted_in_the_session_at_once(cache: SuffixCache) -> None:
    with cache.request([1, 2, 3]) as request:
        assert len(request.draft()) == 0
        request.extend([4, 5, 6, 1, 2])
        tokens, sources = (getattr(request.draft(max_tokens=3), name) for name in ("tokens", "source"))
        assert tokens.tolist() == [3, 4, 5]  # arrays outlive their draft
        assert set(sources.tolist()) == {Source.SESSION}
        request.extend(np.array([3], dtype=np.int64))
        assert request.context.tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3]
        assert request.output.tolist() == [4, 5, 6, 1, 2, 3]


def test_others_see_an_output_after_a_clean_close_only(cache: SuffixCache) -> None:
    with cache.request([1, 2, 3], session="a") as first:
        first.extend([40, 41, 42])
        with cache.request([9, 40], session="b") as second:
            assert len(second.draft()) == 0
    with cache.request([9, 40], session="c") as third:
        draft = third.draft(max_tokens=2)
        assert draft.tokens.tolist() == [41, 42]
        assert set(draft.source.tolist()) == {Source.SHARED}


def test_the_beginning_of_an_output_is_drafted_from_the_end_of_the_prompt(cache: SuffixCache) -> None:
    with cache.request([7, 8, 9], session="a") as request:
        request.extend([40, 41])
    with cache.request([5, 8, 9], session="b") as request:
        assert request.draft(max_tokens=2).tokens.tolist() == [40, 41]


def test_a_partial_output_stays_in_its_session(cache: SuffixCache) -> None:
    def generate() -> None:
        with cache.request([1, 2, 3], session="a") as request:
            request.extend([40, 41, 42])
            raise RuntimeError("cut")

    with pytest.raises(RuntimeError, match="cut"):
        generate()
    with cache.request([9, 40], session="b") as other:
        assert len(other.draft()) == 0
    with cache.request([1, 2, 3, 40, 41, 42, 1, 2, 3], session="a") as same:
        assert same.draft(max_tokens=1).tokens.tolist() == [40]
    assert cache.stats().partial == 1
    assert cache.stats().sequences == 0


def test_abandon_and_no_store(cache: SuffixCache) -> None:
    abandoned = cache.request([1], session="a")
    abandoned.extend([40, 41])
    abandoned.abandon()
    abandoned.close()
    with cache.request([1], session="b", store=False) as unstored:
        unstored.extend([40, 41])
    assert cache.stats().partial == 1
    part = cache.request([1], session="c", share=False)  # of an answer, as a round of retrieval is
    part.extend([40, 41])
    part.abandon()
    assert (cache.stats().sequences, cache.stats().partial) == (0, 1)


def test_accepted_tokens_are_counted(cache: SuffixCache) -> None:
    with cache.request([1, 2, 3, 4, 5, 1, 2]) as request:
        draft = request.draft(max_tokens=3)
        assert draft.tokens.tolist() == [3, 4, 5]
        request.extend([3, 4, 9])
        request.extend([9])  # follows no draft
    stats = cache.stats()
    assert (stats.steps, stats.hits, stats.drafted, stats.accepted, stats.requests) == (1, 1, 3, 2, 1)


def test_an_ended_output_is_not_drafted_on(cache: SuffixCache) -> None:
    """What follows an end of turn in a transcript belongs to the next prompt."""
    transcript = [5, 6, 99]
    for _ in range(30):
        prompt = [*transcript, 1, 2]
        with cache.request(prompt, session="s") as request:
            request.extend([5, 6, 99])
        transcript = [*prompt, 5, 6, 99]
    with cache.request([*transcript, 1, 2], session="s") as request:
        draft = request.draft(max_tokens=5)
        assert draft.tokens[:3].tolist() == [5, 6, 99]
        assert draft.probabilities[3:].max(initial=0) < 0.1 * draft.probabilities[2]


@pytest.mark.parametrize("late", [False, True])
def test_a_draft_may_stand_behind_tokens_that_are_told_later(cache: SuffixCache, late: bool) -> None:
    """It is the same, and counted against what came in its own place."""
    with cache.request([1, 2, 3], session="a") as request:
        request.extend([4, 5, 6, 7, 8, 1, 2])
        held = list[int]()
        for draft, fresh in (([3, 4], [3, 4]), ([5, 6], [5, 6]), ([7, 8], [9])):
            assert request.draft(max_tokens=2, behind=held).tokens.tolist() == draft
            request.extend(held)
            held = fresh
            if not late:
                request.extend(held)
                held = []
        request.extend(held)
        with pytest.raises(InvalidRequestError, match="behind"):
            request.draft(behind=[-1])
    assert (cache.stats().steps, cache.stats().accepted) == (3, 4)
