"""The rules that need no server: breaker, blocks, load, waiting times."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.openai.metrics import ServerLoad, parse_load
from agentspec.backends.pool.attempts import retry_after
from agentspec.backends.pool.member import CircuitBreaker
from agentspec.backends.pool.prompt import BLOCK_BYTES, MAX_BLOCKS, block_hashes


def test_the_breaker_opens_after_five_failures_and_allows_one_trial_after_ten_seconds() -> None:
    breaker = CircuitBreaker(5, 10.0)
    for _ in range(4):
        breaker.failed(0.0)
    for _ in range(16):
        breaker.succeeded()
    for second in range(5):
        assert breaker.allows(second)
        breaker.failed(second)
    assert breaker.state(4.0) == breaker.state(13.9) == "open" and not breaker.allows(13.9)
    assert breaker.state(14.0) == "half_open" and breaker.allows(14.0)
    assert breaker.begin(14.0)
    assert not breaker.allows(14.0)
    breaker.failed(15.0, trial=True)
    assert breaker.state(24.9) == "open" and breaker.allows(25.0)
    assert breaker.begin(25.0)
    breaker.succeeded()
    assert breaker.state(25.0) == "closed" and not breaker.begin(25.0)


def test_of_a_server_that_errs_only_a_trial_closes_the_breaker() -> None:
    breaker = CircuitBreaker(2, 10.0)
    for _ in range(2):
        breaker.failed(0.0, erring=True)
    assert not breaker.begin(5.0)  # sent although it errs, as no other takes calls: no trial
    breaker.succeeded()
    assert breaker.state(5.0) == "open"
    assert breaker.begin(10.0)
    breaker.succeeded(trial=True)
    assert breaker.state(10.0) == "closed"
    breaker.failed(11.0, erring=True)  # what it was is not forgotten at once
    assert breaker.state(11.0) == "open"


@given(st.lists(st.booleans(), max_size=200))
def test_who_fails_less_than_a_fifth_of_the_calls_is_never_left_out(rest: list[bool]) -> None:
    breaker = CircuitBreaker(5, 10.0)
    for fails in rest:
        for answers in (True,) * 4 + (not fails,):
            breaker.succeeded() if answers else breaker.failed(0.0, erring=True)
    assert breaker.state(0.0) == "closed"


def test_a_trial_that_takes_long_keeps_out_nobody_for_longer_than_an_open_breaker() -> None:
    breaker = CircuitBreaker(1, 10.0)
    breaker.failed(0.0)
    for began in (10.0, 20.0):
        assert breaker.allows(began) and breaker.begin(began)
        assert not breaker.allows(began + 9.9) and breaker.trial_at() == began + 10
    breaker.failed(21.0, trial=True)
    assert breaker.state(30.9) == "open"


def test_a_trial_that_runs_when_the_server_shows_to_be_back_closes_the_breaker() -> None:
    breaker = CircuitBreaker(2, 10.0)
    for _ in range(2):
        breaker.failed(0.0)
    breaker.reached(1.0)
    assert breaker.begin(1.0) and not breaker.allows(2.0)
    breaker.reached(3.0)
    assert breaker.state(3.0) == "closed"
    breaker.failed(4.0, trial=True)  # the trial after all: a failure as any other
    assert breaker.state(4.0) == "closed"


@given(st.binary(max_size=5000), st.binary(max_size=3000), st.integers(1, 999))
def test_equal_beginnings_have_equal_blocks_however_the_text_is_cut(text: bytes, more: bytes, size: int) -> None:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    whole = list(block_hashes("t", [text]))
    assert whole == list(block_hashes("t", pieces)) == list(block_hashes("t", [text, more]))[: len(whole)]
    assert len(whole) == len(text) // BLOCK_BYTES
    assert not set(whole) & set(block_hashes("other tenant", [text]))


def test_of_long_prompts_the_beginning_is_read() -> None:
    read: list[int] = []

    def pieces() -> Iterator[bytes]:
        for number in range(4 * MAX_BLOCKS):
            read.append(number)
            yield bytes(BLOCK_BYTES)

    blocks = list(block_hashes("t", pieces()))
    assert len(blocks) == MAX_BLOCKS == len(read) and blocks[0] != blocks[1]


def test_the_load_of_vllm_and_sglang_is_read_from_their_metrics() -> None:
    vllm = (
        '# HELP vllm:num_requests_running x\nvllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 1.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
    )
    assert parse_load(vllm) == ServerLoad(4, 2, 0.75)
    sglang = 'sglang:num_running_reqs{m="x"} 5\nsglang:num_queue_reqs{m="x"} 7\nsglang:token_usage{m="x"} 1.5\n'
    assert parse_load(sglang) == ServerLoad(5, 7, 1.0)
    assert parse_load("process_cpu_seconds_total 3.0\nvllm:num_requests_running NaN\n") is None


def test_how_long_a_server_asks_to_wait() -> None:
    assert retry_after({"retry-after": "2"}) == 2.0
    assert retry_after({"retry-after-ms": "250", "retry-after": "1"}) == 0.25
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 25 < (retry_after({"retry-after": later}) or 0) <= 30
    huge = "Fri, 01 Jan 2027 99999999999999999999:00:00 GMT"
    for wrong in ("", "soon", "-3", "inf", "nan", huge):
        assert retry_after({"retry-after": wrong}) is None
