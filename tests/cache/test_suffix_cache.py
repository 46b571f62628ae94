from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.deletion import PartlyForgottenError
from agentspec.cache.tokens import Tokens
from agentspec.errors import CacheClosedError
from agentspec.types import Namespace, Source


def text(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 5000, length).astype(np.int32)


def record(cache: SuffixCache, prompt: object, output: object, **named: Any) -> None:
    with cache.request(prompt, **named) as request:  # type: ignore[arg-type]
        request.extend(output)  # type: ignore[arg-type]


def test_namespaces_share_nothing() -> None:
    a, b = Namespace("t", "model-a"), Namespace("t", "model-b")
    with SuffixCache.open() as cache:
        record(cache, [1], [40, 41, 42], namespace=a)
        record(cache, [1, 40, 41], [42], namespace=a, session="s")
        for other in (b, "t", "stranger"):
            with cache.request([1, 40], namespace=other, session="s") as request:
                assert len(request.draft()) == 0
        with cache.request([1, 40], namespace=a) as request:
            assert request.draft(max_tokens=1).tokens.tolist() == [41]
        assert cache.stats().namespaces == 4


def test_the_shape_of_past_outputs_is_drafted_between_new_names() -> None:
    with SuffixCache.open() as cache:
        record(cache, [1], [700, 5, 6, 701, 7, 8, 702], namespace="a")
        for namespace, expected in (("a", [7, 8]), ("b", [])):
            with cache.request([1, 900, 5, 6, 901], namespace=namespace) as request:
                draft = request.draft(max_tokens=2, chain=True)
            assert draft.tokens.tolist() == expected
            assert draft.source.tolist() == [Source.SHARED] * len(expected)


def test_an_answer_given_before_is_followed_where_it_leaves_its_prompt() -> None:
    """It copies the prompt but for every fiftieth token, so that both continue the last 49 tokens of the new answer."""
    prompt = text(0, 400)
    answer = prompt.copy()
    answer[50::50] += 5000
    with SuffixCache.open() as cache:
        record(cache, prompt, answer, session="first")
        with cache.request(prompt, session="again") as request:
            request.extend(answer[:150])
            assert request.draft(max_tokens=60, chain=True).tokens.tolist() == answer[150:210].tolist()


def test_what_one_namespace_learns_does_not_reach_another() -> None:
    with SuffixCache.open() as cache:
        for _ in range(5):
            record(cache, [1, 2, 3, 1, 2], [3, 9], namespace="a")
        assert not cache.request([1], namespace="b").drafter.state().any()
        assert cache.request([1], namespace="a").drafter.state().any()


def test_memory_stays_within_the_budget() -> None:
    limit = 3 << 20
    with SuffixCache.open(memory_bytes=limit) as cache:
        for turn in range(300):
            record(cache, text(turn, 700), text(1000 + turn, 900), session=f"s{turn}")
            assert cache.stats().memory_bytes <= limit
        stats = cache.stats()
        assert stats.evicted > 0
        assert stats.tokens > 20_000  # it evicts no more than it must
        assert stats.sessions > 5
        cache.check_integrity()
        with cache.request(np.concatenate((text(1, 5), text(1299, 900)[:100])), session="new") as request:
            assert request.draft(max_tokens=4).tokens.tolist() == text(1299, 900)[100:104].tolist()


def test_a_prompt_larger_than_the_budget_is_served() -> None:
    with SuffixCache.open(memory_bytes=1 << 20) as cache:
        prompt = text(0, 200_000)
        with cache.request(np.concatenate((prompt, prompt[-100:-50])), session="s") as request:
            assert request.draft(max_tokens=4).tokens.tolist() == prompt[-50:-46].tolist()
            request.extend(prompt[-50:])
        assert cache.stats().memory_bytes <= 1 << 20


def test_use_after_close() -> None:
    cache = SuffixCache.open()
    request = cache.request([1, 2])
    cache.close()
    cache.close()
    uses = (lambda: cache.request([1]), cache.flush, cache.stats, cache.check_integrity, request.draft)
    for use in (*uses, lambda: request.extend([1])):
        with pytest.raises(CacheClosedError):
            use()
    request.close()


def test_in_memory_needs_no_database() -> None:
    code = (
        "import sys\nfrom agentspec.cache import SuffixCache\n"
        "with SuffixCache.open() as cache:\n"
        "    with cache.request([1, 2]) as request:\n        request.extend([3])\n"
        "    cache.flush()\n"
        "print([name for name in ('sqlalchemy', 'sqlite3', 'filelock', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("session", [None, "s"])
def test_nothing_is_left_of_a_request_not_to_be_stored(session: str | None) -> None:
    with SuffixCache.open() as cache:
        with cache.request([1, 2, 3, 1, 2], session=session, store=False) as request:
            assert request.draft(max_tokens=1).tokens.tolist() == [3]
            request.extend([3, 4])
            assert cache.stats().sessions == 1
        stats = cache.stats()
        assert (stats.sessions, stats.sequences) == (0, 0)
        record(cache, [1, 2, 3, 1, 2, 3], [4], session="s")
        assert cache.stats().sessions == 1


def test_forget_says_what_a_database_that_could_not_be_opened_may_hold() -> None:
    with SuffixCache.open("postgresql://user@127.0.0.1:1/db") as cache:
        record(cache, [1, 2], [3, 4, 5], session="s")
        with pytest.raises(PartlyForgottenError, match=r"may hold more \(.*127.0.0.1:1.*\); forget again") as caught:
            cache.forget(session="s")
        assert caught.value.count == 1 and cache.stats().sequences == 0


def test_without_a_name_the_continued_session_is_found() -> None:
    """Two conversations share a long system prompt; each goes on in its own."""
    system = text(0, 300)
    pair = [np.concatenate((system, text(seed, 60))) for seed in (1, 2)]
    with SuffixCache.open() as cache:
        for prompt in pair:
            cache.request(prompt).close()
        for prompt in pair:
            following = np.concatenate((prompt, text(9, 10), prompt[-20:-10]))
            with cache.request(following) as request:
                assert request.draft(4).tokens.tolist() == prompt[-10:-6].tolist()
            assert cache.stats().sessions == 2
        cache.request(np.concatenate((system, text(3, 60)))).close()
        assert cache.stats().sessions == 3
