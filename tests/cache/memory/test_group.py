"""Open outputs of one group are drafted by its other members, by nobody else, and only while it lasts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache import CacheRequest, SuffixCache
from agentspec.cache.index import IndexDrafter
from agentspec.errors import InvalidRequestError
from agentspec.types import Namespace, Source
from tests.cache.reference import ReferenceDrafter, ReferenceIndex

PROMPT = [1, 2, 3]


def drafted(request: CacheRequest) -> list[int]:
    return request.draft(max_tokens=2).tokens.tolist()


def test_members_draft_from_each_other_as_they_grow() -> None:
    with SuffixCache.open() as cache:
        first, second = (cache.request(PROMPT, session=name, group="g") for name in "ab")
        others = [
            cache.request(PROMPT, session="c"),
            cache.request(PROMPT, session="d", group="h"),
            cache.request(PROMPT, session="a", group="g", namespace="another tenant"),
            cache.request(PROMPT, session="a", group="g", namespace=Namespace("default", "another model")),
        ]
        first.extend([40, 41])
        assert drafted(second) == [40, 41]
        assert set(second.draft().source.tolist()) == {Source.SHARED}
        first.extend([42])
        second.extend([40, 41])
        assert drafted(second) == [42]
        assert [drafted(other) for other in others] == [[], [], [], []]
        first.close()
        assert drafted(second) == [42]  # for as long as a member is open
        second.close()
        assert drafted(cache.request(PROMPT, session="e", group="g", store=False))[:1] == [40]  # as a finished output


def test_the_last_member_takes_the_group_with_it() -> None:
    with SuffixCache.open() as cache:
        first, second = (cache.request(PROMPT, session=name, group="g", store=False) for name in "ab")
        taken = cache.stats().memory_bytes
        first.extend([40, 41])
        first.close()
        assert drafted(second) == [40, 41]
        second.close()
        assert drafted(cache.request(PROMPT, session="c", group="g")) == []
        assert cache.stats().sequences == 0
        assert cache.stats().memory_bytes < taken


@pytest.mark.parametrize("forget", [False, True])
def test_an_abandoned_or_forgotten_output_is_drafted_no_more(forget: bool) -> None:
    with SuffixCache.open() as cache:
        first, second = (cache.request(PROMPT, session=name, group="g") for name in "ab")
        first.extend([40, 41])
        if forget:
            cache.forget(session="a")
            first.extend([42, 43])
        else:
            first.abandon()
        assert drafted(second) == []
        second.extend([42])
        assert drafted(second) == []
        first.close()
        second.close()


def test_groups_are_refused_where_they_would_share_what_patterns_refuse() -> None:
    with SuffixCache.open(refuse_patterns=["secret"]) as cache:
        with pytest.raises(InvalidRequestError, match="refuse_patterns") as caught:
            cache.request(PROMPT, group="g")
        assert caught.value.param == "group"
        assert cache.request(PROMPT, session="s") is not None
    with SuffixCache.open() as cache, pytest.raises(InvalidRequestError, match="group"):
        cache.request(PROMPT, group=5)  # type: ignore[arg-type]


steps = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=6)), max_size=12)


@given(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30), steps=steps)
def test_the_twin_drafts_the_same(prompt: list[int], steps: list[tuple[int, list[int]]]) -> None:
    """Three members, each with its session's index before the group's."""
    drafter = ReferenceDrafter()
    sessions = [ReferenceIndex() for _ in range(3)]
    group, past, texts = ReferenceIndex(), ReferenceIndex(), [list(prompt) for _ in range(3)]
    for session in sessions:
        session.append(0, prompt)
    with SuffixCache.open() as cache:
        requests = [cache.request(prompt, session=str(number), group="g") for number in range(3)]
        requests[0].drafter.native = IndexDrafter(scan_limit=1 << 30).native
        for member, tokens in steps:
            indexes = [(sessions[member], Source.SESSION), (group, Source.SHARED), (past, Source.SHARED)]
            found = requests[member].draft(max_tokens=8)
            rows = drafter.draft(indexes, texts[member][-64:], 8)
            assert found.tokens.tolist() == [row[0] for row in rows]
            assert found.parents.tolist() == [row[1] for row in rows]
            np.testing.assert_allclose(found.probabilities, [row[2] for row in rows], rtol=0, atol=1e-5)
            requests[member].extend(tokens)
            drafter.observe(indexes, texts[member][-64:], tokens)
            sessions[member].append(0, tokens)
            group.append(member, tokens, prompt if len(texts[member]) == len(prompt) else [])
            texts[member] += tokens
        for request in requests:
            request.abandon()
