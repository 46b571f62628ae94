"""Windows and limiters by a clock of the test's own: sums are those of the last minute, and Retry-After is exact."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentspec.errors import OverRateLimitError, RateLimitError
from agentspec.proxy.metering.demand import Demand
from agentspec.proxy.metering.limiter import Clock, KeyLimiter, Ticket, Verdict
from agentspec.proxy.metering.window import DAY, WINDOW, DayCount, SlidingWindow
from agentspec.settings.rate_limits import RateLimits

MORNING = 20_000 * DAY + 30_000.25


@dataclass
class Hand:
    """A clock that the test moves; its seconds do not begin where its days do."""

    now: float = 0.0
    start: float = MORNING
    skew: float = 977.6
    tickets: list[Ticket] = field(default_factory=list)

    def clock(self) -> Clock:
        return Clock(lambda: self.now + self.skew, lambda: self.now + self.start)

    def limiter(self, **limits: int) -> KeyLimiter:
        return KeyLimiter(RateLimits(**limits), self.clock())


def admitted(limiter: KeyLimiter, tokens: int = 1) -> Verdict:
    verdict = limiter.admit(Demand(tokens, 0))
    assert verdict.refusal is None, verdict.refusal
    return verdict


def refused(limiter: KeyLimiter, tokens: int = 1) -> RateLimitError:
    refusal = limiter.admit(Demand(tokens, 0)).refusal
    assert isinstance(refusal, RateLimitError)
    return refusal


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
@example(1, 0, 0, [(0.0, 1, 1), (59.0, 1, 1)], 1, 0.0)
@example(0, 9, 0, [(0.0, 9, 5), (59.0, 4, 4)], 1, 0.0)
@given(
    st.integers(0, 4),
    st.integers(0, 400),
    st.integers(0, 1500),
    st.lists(
        st.tuples(
            st.sampled_from([0, 0.5, 1, 7.3, 58, 59]) | st.floats(0, 40), st.integers(1, 400), st.integers(0, 500)
        ),
        min_size=2,
        max_size=8,
    ),
    st.integers(1, 400),
    st.floats(0, DAY),
)
def test_at_retry_after_a_request_is_admitted_and_a_second_before_it_is_not(
    requests: int,
    tokens: int,
    day: int,
    history: list[tuple[float, int, int]],
    wanted: int,
    start: float,
) -> None:
    hand = Hand(start=20_000 * DAY + start)
    limiter = hand.limiter(requests_per_minute=requests, tokens_per_minute=tokens, tokens_per_day=day)
    for pause, asked, used in history:
        hand.now += pause
        if (ticket := limiter.admit(Demand(asked, 0)).ticket) is not None:
            limiter.settle(ticket, used)
    refusal = limiter.admit(Demand(wanted, 0)).refusal
    if isinstance(refusal, OverRateLimitError):
        assert 0 < tokens < wanted or 0 < day < wanted
    elif isinstance(refusal, RateLimitError):
        began, wait = hand.now, refusal.retry_after
        assert wait == int(wait) and 1 <= wait <= DAY
        hand.now = began + wait - 1
        assert limiter.admit(Demand(wanted, 0)).refusal is not None
        hand.now = began + wait
        assert limiter.admit(Demand(wanted, 0)).ticket is not None


@given(st.integers(1, 30), st.lists(st.floats(0, 20), max_size=120))
def test_no_minute_has_more_requests_than_allowed(limit: int, pauses: list[float]) -> None:
    hand, times = Hand(), []
    limiter = hand.limiter(requests_per_minute=limit)
    for pause in pauses:
        hand.now += pause
        if limiter.admit(Demand(1, 0)).ticket is not None:
            times.append(int(hand.now + hand.skew))
    for end in times:
        assert sum(end - WINDOW < time <= end for time in times) <= limit


def test_tokens_are_corrected_when_a_request_is_over() -> None:
    hand = Hand()
    limiter = hand.limiter(tokens_per_minute=100)
    first = admitted(limiter, 80)
    assert first.standing == [("tokens", 100, 20, 60)]
    assert refused(limiter, 30).retry_after == 60
    hand.now += 10
    assert first.ticket is not None
    limiter.settle(first.ticket, 20)
    second = admitted(limiter, 80)
    assert second.ticket is not None and refused(limiter, 1).retry_after == 50
    limiter.settle(second.ticket, 95)  # more than was thought
    assert refused(limiter, 1).retry_after == 50 and refused(limiter, 10).retry_after == 60


def test_what_a_request_took_beyond_its_estimate_counts_though_the_estimate_is_old() -> None:
    hand = Hand()
    limiter = hand.limiter(tokens_per_minute=100)
    long = admitted(limiter, 40).ticket
    hand.now += 300
    assert long is not None
    limiter.settle(long, 120)
    assert refused(limiter, 21).retry_after == 60
    admitted(limiter, 20)


def test_an_answer_without_a_bound_makes_no_request_too_large() -> None:
    limiter = Hand().limiter(tokens_per_minute=100)
    assert isinstance(limiter.admit(Demand(90, 11)).refusal, OverRateLimitError)
    assert isinstance(limiter.admit(Demand(101, 0, bounded=False)).refusal, OverRateLimitError)
    verdict = limiter.admit(Demand(90, 256, bounded=False))
    assert verdict.ticket is not None and verdict.ticket.tokens == 100


def test_as_many_as_allowed_run_at_once() -> None:
    limiter = Hand().limiter(concurrent_requests=2)
    first, _ = admitted(limiter), admitted(limiter)
    assert (refused(limiter).limit, refused(limiter).retry_after) == ("concurrent_requests", 1)
    assert first.ticket is not None
    limiter.settle(first.ticket, 0)
    admitted(limiter)


def test_the_day_ends_at_midnight() -> None:
    hand = Hand(start=20_000 * DAY + DAY - 100.5)
    limiter = hand.limiter(tokens_per_day=100)
    running = admitted(limiter, 90).ticket
    assert (refused(limiter, 11).limit, refused(limiter, 11).retry_after) == ("tokens_per_day", 101)
    hand.now = 101
    assert admitted(limiter, 11).standing == [("tokens-day", 100, 89, DAY)]
    assert running is not None
    limiter.settle(running, 60)  # counts on the day of its end
    assert refused(limiter, 30).limit == "tokens_per_day" and admitted(limiter, 29)


def test_a_clock_that_was_wrong_stops_no_key() -> None:
    day = DayCount()
    day.advance(20_000 * DAY)
    day.reserved += 5
    day.advance(30_000 * DAY)
    day.reserved += 100
    day.advance(20_000 * DAY + 9)
    assert (day.total, day.wait(20_000 * DAY + 9, 10, 10)) == (0, 0)
    day.settle(20_000, 5, 3)
    assert (day.reserved, day.total) == (0, 3)
    day.advance(20_001 * DAY)
    day.used += 4
    day.advance(20_001 * DAY - 1)
    assert (day.day, day.total) == (20_001, 4), "set back by a second at midnight"


def test_what_others_stored_of_the_day_counts_and_nothing_counts_twice() -> None:
    hand = Hand()
    limiter = hand.limiter(tokens_per_day=1000)
    ticket = admitted(limiter, 100).ticket
    assert ticket is not None
    limiter.settle(ticket, 100)
    limiter.recorded(20_000, 100, 400)
    assert admitted(limiter, 1).standing == [("tokens-day", 1000, 599, DAY - 30_000)]
    limiter.recorded(20_000, 0, 350)  # a report that was passed by another
    limiter.recorded(19_999, 50, 900)  # of yesterday
    assert admitted(limiter, 1).standing[0][2] == 598


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90)), max_size=40))
def test_a_day_is_what_is_stored_and_what_is_not_yet(steps: list[tuple[int, int]]) -> None:
    day = DayCount()
    day.advance(MORNING)
    stored = waiting = running = 0
    for what, amount in steps:
        if what == 0:
            day.reserved += amount
            running += amount
        elif what == 1 and running:
            day.settle(20_000, running, amount)
            running, waiting = 0, waiting + amount
        elif what == 2:
            stored += waiting + amount  # of which another gateway used `amount`
            day.recorded(20_000, waiting, stored)
            waiting = 0
        assert day.total == stored + waiting + running


def test_other_limits_hold_for_what_was_used_before() -> None:
    hand = Hand()
    limiter = hand.limiter(requests_per_minute=10)
    admitted(limiter, 70)
    limiter.limits = RateLimits(tokens_per_minute=100)
    assert refused(limiter, 31).limit == "tokens_per_minute"
    limiter.limits = RateLimits()
    admitted(limiter, 10_000)


@pytest.mark.parametrize(("own", "default", "found"), [(None, 5, 5), (7, 5, 7), (0, 5, None), (None, None, None)])
def test_a_keys_own_limit_comes_before_the_default(own: int | None, default: int | None, found: int | None) -> None:
    limits = RateLimits(tokens_per_day=own).over(RateLimits(tokens_per_day=default))
    assert limits.tokens_per_day == found and limits.unlimited == (found is None)
