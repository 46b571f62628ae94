"""Windows and limiters by a clock of the test's own: sums are those of the last minute, and Retry-After is exact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentspec.errors import OverRateLimitError, RateLimitError
from agentspec.proxy.metering.demand import Demand
from agentspec.proxy.metering.limits import WINDOW, KeyLimiter, SlidingWindow
from agentspec.settings.server import RateLimits


@dataclass
class Hand:
    """A clock that the test moves."""

    now: float = 0.0
    skew: float = 977.6

    def limiter(self, **limits: int) -> KeyLimiter:
        given = {name: limit for name, limit in limits.items() if limit}
        return KeyLimiter(RateLimits(**given), lambda: self.now + self.skew)


def admitted(limiter: KeyLimiter, tokens: int = 1) -> Callable[[int], None]:
    return limiter.admit(Demand(tokens, 0))


def refused(limiter: KeyLimiter, tokens: int = 1) -> RateLimitError:
    with pytest.raises(RateLimitError) as caught:
        limiter.admit(Demand(tokens, 0))
    return caught.value


def left(limiter: KeyLimiter) -> bytes:
    return dict(limiter.headers(anthropic=False))[b"x-ratelimit-remaining-tokens"]


STEPS = st.lists(
    st.tuples(st.sampled_from([0, 1, 59, 60]) | st.integers(0, 90), st.integers(0, 50), st.integers(0, 100)),
    max_size=60,
)


@settings(max_examples=50)
@given(STEPS)
def test_a_window_is_the_sum_of_its_last_seconds(steps: list[tuple[int, int, int]]) -> None:
    window, now = SlidingWindow(), 1000
    added: list[list[int]] = []
    for pause, amount, percent in steps:
        now += pause
        window.advance(now)
        window.add(amount)
        added.append([now, amount])
        if percent < 50:  # as much of an earlier one is given back
            chosen = added[len(added) * percent // 50]
            back = chosen[1] * percent // 50
            window.give_back(chosen[0], back)
            chosen[1] -= back
        recent = [amount for second, amount in added if now - second < WINDOW]
        assert window.total == sum(recent)
        assert window.reset == max((WINDOW - now + second for second, amount in added if amount), default=0) or (
            window.total == 0 == window.reset
        )


def test_nothing_is_given_back_that_is_gone() -> None:
    window = SlidingWindow()
    window.advance(1000)
    window.add(5)
    window.advance(1000 + WINDOW - 1)
    window.give_back(1000, 2)
    assert window.total == 3
    window.advance(1000 + WINDOW)
    window.give_back(1000, 3)
    assert (window.total, window.reset) == (0, 0)


@settings(max_examples=60)
@example(1, 0, [(0.0, 1, 1), (59.0, 1, 1)], 1)
@example(0, 9, [(0.0, 9, 5), (59.0, 4, 4)], 1)
@given(
    st.integers(0, 4),
    st.integers(0, 400),
    st.lists(
        st.tuples(
            st.sampled_from([0, 0.5, 1, 7.3, 58, 59]) | st.floats(0, 40), st.integers(1, 400), st.integers(0, 500)
        ),
        min_size=2,
        max_size=8,
    ),
    st.integers(1, 400),
)
def test_at_retry_after_a_request_is_admitted_and_a_second_before_it_is_not(
    requests: int, tokens: int, history: list[tuple[float, int, int]], wanted: int
) -> None:
    hand = Hand()
    limiter = hand.limiter(requests_per_minute=requests, tokens_per_minute=tokens)
    for pause, asked, used in history:
        hand.now += pause
        with suppress(RateLimitError, OverRateLimitError):
            limiter.admit(Demand(asked, 0))(used)
    try:
        limiter.admit(Demand(wanted, 0))
    except OverRateLimitError:
        assert 0 < tokens < wanted
    except RateLimitError as refusal:
        began, wait = hand.now, refusal.retry_after
        assert wait == int(wait) and 1 <= wait <= WINDOW
        hand.now = began + wait - 1
        refused(limiter, wanted)
        hand.now = began + wait
        admitted(limiter, wanted)


@given(st.integers(1, 30), st.lists(st.floats(0, 20), max_size=120))
def test_no_minute_has_more_requests_than_allowed(limit: int, pauses: list[float]) -> None:
    hand, times = Hand(), []
    limiter = hand.limiter(requests_per_minute=limit)
    for pause in pauses:
        hand.now += pause
        with suppress(RateLimitError):
            limiter.admit(Demand(1, 0))
            times.append(int(hand.now + hand.skew))
    for end in times:
        assert sum(end - WINDOW < time <= end for time in times) <= limit


def test_the_headers_tell_where_a_key_stands() -> None:
    hand = Hand()
    limiter = hand.limiter(requests_per_minute=60, tokens_per_minute=1000)
    admitted(limiter, 300)
    assert dict(limiter.headers(anthropic=False)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1m0s",
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"700",
        b"x-ratelimit-reset-tokens": b"1m0s",
    }
    found = dict(limiter.headers(anthropic=True))
    assert found[b"anthropic-ratelimit-tokens-remaining"] == b"700" and len(found) == 6


def test_tokens_are_corrected_when_a_request_is_over() -> None:
    hand = Hand()
    limiter = hand.limiter(tokens_per_minute=100)
    settle = admitted(limiter, 80)
    assert left(limiter) == b"20" and refused(limiter, 30).retry_after == 60
    hand.now += 10
    settle(20)
    second = admitted(limiter, 80)
    assert refused(limiter, 1).retry_after == 50
    second(95)  # more than was thought
    assert refused(limiter, 1).retry_after == 50 and refused(limiter, 10).retry_after == 60


def test_what_a_request_took_beyond_its_estimate_counts_though_the_estimate_is_old() -> None:
    hand = Hand()
    limiter = hand.limiter(tokens_per_minute=100)
    settle = admitted(limiter, 40)
    hand.now += 300
    settle(120)
    assert refused(limiter, 21).retry_after == 60
    admitted(limiter, 20)


def test_an_answer_without_a_bound_makes_no_request_too_large() -> None:
    limiter = Hand().limiter(tokens_per_minute=100)
    for demand in (Demand(90, 11), Demand(101, 0, bounded=False)):
        with pytest.raises(OverRateLimitError):
            limiter.admit(demand)
    limiter.admit(Demand(90, 256, bounded=False))
    assert left(limiter) == b"0"


def test_what_runs_in_the_background_names_a_bound() -> None:
    """Nothing of it arrives here by which it could be charged later."""
    limiter = Hand().limiter(tokens_per_minute=1000)
    with pytest.raises(OverRateLimitError, match="max_output_tokens"):
        limiter.admit(Demand(1, 256, bounded=False, background=True))
    limiter.admit(Demand(1, 256, background=True))
    Hand().limiter(requests_per_minute=1).admit(Demand(1, 256, bounded=False, background=True))


def test_other_limits_hold_for_what_was_used_before() -> None:
    hand = Hand()
    limiter = hand.limiter(requests_per_minute=10)
    admitted(limiter, 70)
    limiter.limits = RateLimits(tokens_per_minute=100)
    assert refused(limiter, 31).limit == "tokens_per_minute"
    limiter.limits = RateLimits()
    admitted(limiter, 10_000)
