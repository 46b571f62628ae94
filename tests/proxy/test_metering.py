"""Limits of API keys: what a request takes, windows of a minute, and keys at the gateway."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentspec.errors import EngineError, OverRateLimitError, RateLimitError
from agentspec.proxy.metering import WINDOW, Demand, KeyLimiter
from agentspec.settings.server import ApiKey, RateLimits
from agentspec.testing import Answer, FakeBackend


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


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 8},
    "/v1/completions": {"prompt": "hi", "max_tokens": 8},
    MESSAGES: {"messages": HI, "max_tokens": 8},
    RESPONSES: {"input": "hi", "max_output_tokens": 8},
}
STREAM = "text/event-stream"
MINUTE = re.compile(r"(\d|[1-5]\d)s|1m0s")


@pytest.fixture
def keyed(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Start a gateway with the key `canary-a` of tenant a and `canary-b` of b, which has no limits."""
    monkeypatch.setenv("KEY_A", "canary-a")
    monkeypatch.setenv("KEY_B", "canary-b")

    def start(backend: Any, **limits: Any) -> Any:
        return gateway({"fake": backend}, api_keys=keys(**limits))

    return start


def keys(**limits: Any) -> tuple[ApiKey, ...]:
    return ApiKey(tenant="a", key_env="KEY_A", **limits), ApiKey(tenant="b", key_env="KEY_B")


def post(running: Any, path: str, key: str = "a", **fields: Any) -> httpx.Response:
    body = {"model": "fake", **BODIES.get(path, {}), **fields}
    return httpx.post(running.url + path, json=body, headers={"authorization": f"Bearer canary-{key}"}, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_headers_report_the_limits_and_the_next_request_is_refused(keyed: Any, path: str, stream: bool) -> None:
    running = keyed(FakeBackend(Answer(text="one two")), requests_per_minute=2, tokens_per_minute=1000)
    for left in (1, 0):
        answer = post(running, path, stream=stream)
        assert answer.status_code == 200, answer.text
        found = answer.headers
        assert (found["x-ratelimit-limit-requests"], found["x-ratelimit-limit-tokens"]) == ("2", "1000")
        assert found["x-ratelimit-remaining-requests"] == str(left)
        assert 0 < int(found["x-ratelimit-remaining-tokens"]) < 1000
        assert all(MINUTE.fullmatch(found[f"x-ratelimit-reset-{one}"]) for one in ("requests", "tokens"))
    refused = post(running, path, stream=stream)
    assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
    error = refused.json()["error"]
    assert error["type"] == "rate_limit_error" and "requests_per_minute = 2" in error["message"]
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.json().get("type") == "error" if path == MESSAGES else error["code"] == "rate_limit_exceeded"
    other = post(running, path, "b", stream=stream)
    assert other.status_code == 200 and not any("ratelimit" in name for name in other.headers)
    assert running.metric("agentspec_rejected_total", tenant="a", reason="requests_per_minute") == 1


def test_requests_that_generate_nothing_are_not_limited(keyed: Any) -> None:
    running = keyed(FakeBackend("hi"), requests_per_minute=1)
    assert post(running, CHAT, model="unknown").status_code == 404
    assert post(running, CHAT).status_code == 200
    assert post(running, CHAT).status_code == 429
    keyed_a = {"authorization": "Bearer canary-a"}
    assert httpx.get(f"{running.url}/v1/models", headers=keyed_a).status_code == 200
    assert post(running, "/v1/messages/count_tokens", messages=HI).status_code != 429


def test_a_request_above_the_limit_gets_400(keyed: Any) -> None:
    running = keyed(FakeBackend("hi"), tokens_per_minute=100)
    for path in (CHAT, RESPONSES):
        name = "max_output_tokens" if path == RESPONSES else "max_tokens"
        answer = post(running, path, **{name: 500})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "request_over_rate_limit"
        assert "tokens_per_minute = 100" in answer.json()["error"]["message"]
        assert "retry-after" not in answer.headers
    assert post(running, MESSAGES, max_tokens=500).json()["error"]["type"] == "invalid_request_error"
    unbounded = {name: value for name, value in BODIES[CHAT].items() if name != "max_tokens"}
    headers = {"authorization": "Bearer canary-a"}
    asked = httpx.post(running.url + CHAT, json={"model": "fake", **unbounded}, headers=headers)
    assert asked.status_code == 200 and asked.headers["x-ratelimit-remaining-tokens"] == "0"


def test_a_background_request_needs_a_bound(keyed: Any) -> None:
    """No part of it arrives here by which it could be charged later."""
    running = keyed(FakeBackend("hi"), tokens_per_minute=1000)
    body = {"model": "fake", "input": "hi", "background": True}
    headers = {"authorization": "Bearer canary-a"}
    refused = httpx.post(running.url + RESPONSES, json=body, headers=headers)
    assert refused.status_code == 400 and "max_output_tokens" in refused.json()["error"]["message"]


def left(running: Any) -> int:
    """The tokens that the key has left, once every request is over."""
    running.metric("agentspec_requests_in_flight")
    answer = post(running, CHAT, max_tokens=0)
    return int(answer.headers["x-ratelimit-remaining-tokens"])


def test_a_failed_call_gives_its_tokens_back(keyed: Any) -> None:
    fake = FakeBackend(Answer(text="one two", error=EngineError("broken"), error_after=0))
    running = keyed(fake, tokens_per_minute=2000)
    before = left(running)
    assert post(running, CHAT, max_tokens=1500).status_code == 500
    assert before - left(running) < 100
    assert post(running, CHAT, max_tokens=1500, stop=5).status_code == 400
    assert before - left(running) < 200


@pytest.mark.parametrize("reported", [False, True])
def test_an_answer_without_usage_is_charged_the_estimate(keyed: Any, upstream: Any, reported: bool) -> None:
    content: dict[str, Any] = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
    if reported:
        content["usage"] = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}

    def script(request: Any) -> None:
        request.answer(json.dumps(content).encode(), x_ratelimit_remaining_tokens="77")

    running = keyed(upstream(script).backend(shared_upstream=True), tokens_per_minute=2000)
    first = int(post(running, CHAT, max_tokens=900).headers["x-ratelimit-remaining-tokens"])
    assert 1050 < first < 1100, "the upstream's own limits are none of this key's"
    running.metric("agentspec_requests_in_flight")
    second = post(running, CHAT, max_tokens=900)
    assert int(second.headers["x-ratelimit-remaining-tokens"]) == (first - 5 if reported else 2 * first - 2000)
    assert post(running, CHAT, "b").headers["x-ratelimit-remaining-tokens"] == "77"


@pytest.mark.parametrize(("local", "leaves", "bound"), [(False, False, None), (True, True, None), (True, True, 3500)])
def test_a_stream_without_usage_is_charged_by_its_events(
    keyed: Any, upstream: Any, local: bool, leaves: bool, bound: int | None
) -> None:
    """A stream that reports no usage, or whose client leaves before it does, is no way around the limit."""
    count = 600
    piece = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
    end = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    generated = FakeBackend(Answer(text="a " * 2 * count, latency=0.001))
    streaming = upstream(lambda one: one.answer(piece * count + end, 200, STREAM))
    backend = generated if local else streaming.backend(shared_upstream=True)
    running = keyed(backend, tokens_per_minute=5000)
    body = {"model": "fake", "messages": HI, "stream": True, "max_tokens": bound}
    with httpx.stream("POST", running.url + CHAT, json=body, headers={"authorization": "Bearer canary-a"}) as answer:
        lines = (line for line in answer.iter_lines() if line)
        for _ in range(count - 50):
            next(lines)
        if not leaves:
            assert [*lines][-1] == "data: [DONE]"
    assert 4000 < left(running) < 5000 - (count - 50)


@pytest.mark.parametrize("how", ["error event", "cut"])
def test_an_answer_that_breaks_off_is_charged_by_its_events(
    gateway: Any, upstream: Any, monkeypatch: Any, how: str
) -> None:
    """Who reads all but the tail of an answer does not get it for nothing."""
    monkeypatch.setenv("KEY_A", "canary-a")
    piece = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
    tail = b'data: {"error": {"message": "gone", "code": 500}}\n\n' if how == "error event" else b""

    def script(request: Any) -> None:
        request.head()
        request.send(piece * 500 + tail)

    backends = {"fake": upstream(script).backend(shared_upstream=True)}
    running = gateway(backends, api_keys=keys(tokens_per_minute=5000)[:1])
    assert post(running, CHAT, stream=True, max_tokens=4000).text.count('"content"') == 500
    running.metric("agentspec_requests_in_flight")
    again = post(running, CHAT, stream=True, max_tokens=1)
    assert 4400 < int(again.headers["x-ratelimit-remaining-tokens"]) < 4500


def test_an_image_is_not_charged_by_its_bytes(keyed: Any, upstream: Any) -> None:
    running = keyed(upstream(lambda one: one.answer(b"{}")).backend(shared_upstream=True), tokens_per_minute=5000)
    picture = "data:image/png;base64," + base64.b64encode(bytes(300_000)).decode()
    content = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": picture}}]
    answer = post(running, CHAT, messages=[{"role": "user", "content": content}], max_tokens=5)
    assert 1000 < 5000 - int(answer.headers["x-ratelimit-remaining-tokens"]) < 1200
