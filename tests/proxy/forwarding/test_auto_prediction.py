"""Predictions from a tenant's earlier answers, for hosted upstreams that know the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from agentspec.backends.settings import OpenAISettings
from agentspec.cache.settings import CacheSettings
from agentspec.proxy.forwarding import auto_prediction
from agentspec.proxy.forwarding.auto_prediction import HEADER, MIN_SEEN, AcceptanceRates, may_predict
from agentspec.settings.api_keys import ApiKey
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings

TEXT = "the quick brown fox jumps over the lazy dog, and again over the fence"
MESSAGES = [{"role": "user", "content": "tell me"}]
PREDICTION = {"type": "content", "content": TEXT}
KEYS = {"one": "k" * 32, "two": "j" * 32}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups that a busy machine makes slow are waited for."""
    monkeypatch.setattr(auto_prediction, "LOOKUP_SECONDS", 120.0)
    monkeypatch.setattr(auto_prediction, "PATIENCE", 120.0)


class Hosted:
    """A hosted API that answers `text`, and says what it was sent."""

    def __init__(self, upstream: Any, owner: str = "openai") -> None:
        self.text, self.status, self.owner = TEXT, 200, owner
        self.usage: dict[str, Any] = {"prompt_tokens": 2, "completion_tokens": 9}
        self.finish, self.refusal = "stop", "no"
        self.knows = False  # whether it refuses predictions alone
        self.server = upstream(self._answer)

    @property
    def sent(self) -> list[dict[str, Any]]:
        return [request.json for request in self.server.requests if request.target == "/v1/chat/completions"]

    def _answer(self, request: Any) -> None:
        if request.method == "GET":
            listed = {"data": [{"id": "m", "owned_by": self.owner}]}
            return request.answer(json.dumps(listed).encode(), status=200 if request.target == "/v1/models" else 404)
        if request.target != "/v1/chat/completions":
            return request.answer(b"{}", status=404)
        if self.status != 200 and ("prediction" in request.json or not self.knows):
            return request.answer(json.dumps({"error": {"message": self.refusal}}).encode(), status=self.status)
        if not request.json.get("stream"):
            choice = {"index": 0, "message": {"content": self.text}, "finish_reason": self.finish}
            return request.answer(json.dumps({"choices": [choice], "usage": self.usage}).encode())
        request.head()
        for piece in (self.text[:9], self.text[9:]):
            request.send(b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": piece}}]}).encode())
            request.send(b"\n\n")
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish}]}
        request.send(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")


def settings(url: str, *, share: float | None = 0.8, cache: Any = None, tenants: bool = False) -> Settings:
    up = OpenAISettings(base_url=url, auto_prediction=share, shared_upstream=True)  # type: ignore[arg-type]
    keys = tuple(ApiKey(tenant=name, key_env=f"KEY_{name}") for name in KEYS) if tenants else ()
    return Settings(
        server=ServerSettings(api_keys=keys),
        backends={"up": up},
        models={"m": ModelSettings(backend="up")},
        **({} if cache is None else {"cache": cache}),
    )


@pytest.fixture
def hosted(upstream: Any) -> Hosted:
    return Hosted(upstream)


@pytest.fixture
def running(gateway: Any, hosted: Hosted) -> Any:
    """A gateway that predicts for `hosted`."""
    return gateway({}, settings(hosted.server.url))


def ask(running: Any, *, headers: Any = None, tenant: str = "", **fields: Any) -> httpx.Response:
    key = {"authorization": f"Bearer {KEYS[tenant]}"} if tenant else {}
    body = {"model": "m", "messages": MESSAGES, **fields}
    url = f"{running.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, headers={**key, **(headers or {})}, timeout=60)
    running.metric("agentspec_requests_in_flight")  # the answer is kept after it was sent
    return answer


def warm(running: Any, count: int = MIN_SEEN + 1, **given: Any) -> None:
    """Ask as often as must be seen before anything is predicted."""
    for _ in range(count):
        assert HEADER not in ask(running, **given).headers


@pytest.mark.parametrize("stream", [False, True])
def test_what_comes_back_again_and_again_is_predicted(running: Any, hosted: Hosted, stream: bool) -> None:
    warm(running, stream=stream)
    answer = ask(running, stream=stream)
    assert answer.headers[HEADER] == "1.00"
    assert [sent.get("prediction") for sent in hosted.sent] == [None] * (MIN_SEEN + 1) + [PREDICTION]
    events = [json.loads(data) for data in answer.text.split("data: ") if data.startswith("{")] if stream else []
    body = events[-1] if stream else answer.json()
    assert body["speculation"] == {"auto_prediction": True, "expected_acceptance": 1.0}
    assert not any("speculation" in event for event in events[:-1])


def test_off_by_default(gateway: Any, upstream: Any) -> None:
    hosted = Hosted(upstream)
    assert OpenAISettings(base_url="http://x/v1").auto_prediction is None  # type: ignore[arg-type]
    running = gateway({}, settings(hosted.server.url, share=None))
    warm(running, MIN_SEEN + 3)
    assert not any("prediction" in sent for sent in hosted.sent)


@pytest.mark.slow
def test_answers_that_differ_are_not_predicted(running: Any, hosted: Hosted) -> None:
    for number in range(MIN_SEEN + 3):
        hosted.text = " ".join(f"w{number}x{place}" for place in range(30))
        assert HEADER not in ask(running).headers
    assert not any("prediction" in sent for sent in hosted.sent)


@pytest.mark.slow
def test_it_ends_when_the_upstream_counts_rejected_tokens(running: Any, hosted: Hosted) -> None:
    warm(running)
    details = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 20}
    hosted.usage = {**hosted.usage, "completion_tokens_details": details}
    used = [HEADER in ask(running).headers for _ in range(4)]
    assert used[0] and not used[-1]


def test_an_edit_is_predicted_from_the_steps_latest_answer(running: Any, hosted: Hosted) -> None:
    labels = {"x-agentspec-workflow": "w", "x-agentspec-step": "edit"}
    for number in range(MIN_SEEN + 1):  # other messages each time, and nearly the same answer
        hosted.text = f"{TEXT}, {number}"
        ask(running, messages=[{"role": "user", "content": f"change {number}"}], headers=labels)
    answer = ask(running, messages=[{"role": "user", "content": "once more"}], headers=labels)
    assert float(answer.headers[HEADER]) > 0.8
    assert hosted.sent[-1]["prediction"]["content"] == f"{TEXT}, {MIN_SEEN}"
    other = ask(running, messages=[{"role": "user", "content": "new"}], headers={"x-agentspec-step": "other"})
    assert HEADER not in other.headers


def test_tenants_never_share(gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(f"KEY_{name}", key)
    hosted = Hosted(upstream)
    running = gateway({}, settings(hosted.server.url, tenants=True))
    same = {"x-agentspec-session": "s", "x-agentspec-step": "t"}
    warm(running, tenant="one", headers=same)
    assert HEADER in ask(running, tenant="one", headers=same).headers
    warm(running, tenant="two", headers=same)  # begins anew
    hosted.text = "something else"
    assert HEADER in ask(running, tenant="two", headers=same).headers
    assert hosted.sent[-1]["prediction"] == PREDICTION  # its own


REFUSED_BESIDE: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"functions": [{"name": "f"}]},
    {"n": 2},
    {"logprobs": True},
    {"max_completion_tokens": 50},
    {"presence_penalty": 0.5},
    {"prediction": {"type": "content", "content": "the client's own"}},
]


def test_a_request_that_allows_no_prediction_gets_none(running: Any, hosted: Hosted) -> None:
    warm(running)
    for fields in REFUSED_BESIDE:
        assert HEADER not in ask(running, **fields).headers
        assert hosted.sent[-1].get("prediction") == fields.get("prediction")
    assert HEADER in ask(running).headers


@pytest.mark.slow
def test_neither_do_clients_that_want_none(running: Any, hosted: Hosted) -> None:
    warm(running)
    assert HEADER not in ask(running, headers={"x-agentspec-speculation": "off"}).headers
    assert HEADER in ask(running).headers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "headers"),
    [
        (CacheSettings(store=False), {}),
        (CacheSettings(), {"x-agentspec-store": "off"}),
        (CacheSettings(refuse_patterns=("quick.*fox",)), {}),
    ],
)
def test_what_may_not_be_stored_is_not_predicted(gateway: Any, upstream: Any, cache: Any, headers: Any) -> None:
    hosted = Hosted(upstream)
    running = gateway({}, settings(hosted.server.url, cache=cache))
    warm(running, MIN_SEEN + 3, headers=headers)
    assert not any("prediction" in sent for sent in hosted.sent)


def test_what_is_forgotten_is_not_predicted(running: Any, hosted: Hosted) -> None:
    warm(running)
    running.runtime.cache.forget(text="quick brown", decode=lambda ids: "")
    assert HEADER not in ask(running).headers


@pytest.mark.slow
def test_cut_answers_and_failures_teach_nothing(running: Any, hosted: Hosted) -> None:
    hosted.finish = "length"
    warm(running, MIN_SEEN + 3)
    assert not any("prediction" in sent for sent in hosted.sent)


def test_an_upstream_that_refuses_predictions_gets_no_more(running: Any, hosted: Hosted) -> None:
    warm(running)
    hosted.status = 400
    assert ask(running).status_code == 400
    hosted.status = 200
    assert ask(running).status_code == 200
    assert ["prediction" in sent for sent in hosted.sent[-2:]] == [True, False]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_prediction_is_refused_goes_again_without(running: Any, hosted: Hosted, stream: bool) -> None:
    warm(running)
    hosted.status, hosted.knows, hosted.refusal = 422, True, "Unrecognized request argument: prediction"
    answer = ask(running, stream=stream)
    assert answer.status_code == 200 and HEADER not in answer.headers and "speculation" not in answer.text
    assert [sent.get("prediction") for sent in hosted.sent[-2:]] == [PREDICTION, None]
    assert {**hosted.sent[-2], "prediction": None} == {**hosted.sent[-1], "prediction": None}
    assert running.metric("agentspec_auto_predictions_refused_total", model="m") == 1
    asked = len(hosted.sent)
    ask(running)
    assert len(hosted.sent) == asked + 1, "the refusal is remembered"


def test_a_second_refusal_is_the_clients(running: Any, hosted: Hosted) -> None:
    warm(running)
    hosted.status, hosted.refusal = 400, "prediction or not: no"
    asked = len(hosted.sent)
    answer = ask(running)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == hosted.refusal
    assert len(hosted.sent) == asked + 2


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_the_clients_idempotency_key_is_of_its_own_body(running: Any, hosted: Hosted, route: str) -> None:
    """A server that knows the key would answer the second body as it answered the first, or refuse it."""
    body = {"model": "m", "max_tokens": 99, "messages": MESSAGES}
    if route == "responses":
        body = {"model": "m", "input": "tell me"}

    def keys() -> list[Any]:
        asked, headers = len(hosted.server.requests), {"idempotency-key": "once"}
        assert httpx.post(f"{running.url}/v1/{route}", json=body, headers=headers, timeout=60).status_code == 200
        running.metric("agentspec_requests_in_flight")
        sent = [one for one in hosted.server.requests[asked:] if one.target == "/v1/chat/completions"]
        return [(one.headers["idempotency-key"], "prediction" in one.json) for one in sent]

    assert all(keys() == [("once", False)] for _ in range(MIN_SEEN + 1))
    [(with_one, predicted)] = keys()
    assert predicted and with_one.startswith("once-") and keys() == [(with_one, True)]
    hosted.status, hosted.knows, hosted.refusal = 400, True, "unknown field: prediction"
    assert keys() == [(with_one, True), ("once", False)] and keys() == [("once", False)]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/responses", {"input": "tell me"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 99}),
    ],
)
def test_translated_requests_are_predicted_too(running: Any, hosted: Hosted, route: str, body: Any) -> None:

    def told() -> Any:
        answer = httpx.post(f"{running.url}{route}", json={"model": "m", **body}, timeout=60)
        assert answer.status_code == 200 and TEXT in answer.text
        running.metric("agentspec_requests_in_flight")
        return answer.headers

    assert not any(HEADER in told() for _ in range(MIN_SEEN + 1))
    assert told()[HEADER] == "1.00" and hosted.sent[-1]["prediction"] == PREDICTION
    hosted.status, hosted.knows, hosted.refusal = 400, True, "unknown field: prediction"
    headers = told()
    assert HEADER not in headers and headers["x-agentspec-translated"] == "chat.completions"
    assert ["prediction" in sent for sent in hosted.sent[-2:]] == [True, False]


@pytest.mark.slow
def test_vllm_drafts_by_itself(gateway: Any, upstream: Any) -> None:
    hosted = Hosted(upstream, owner="vllm")
    running = gateway({}, settings(hosted.server.url))
    warm(running, MIN_SEEN + 3)
    assert not any("prediction" in sent for sent in hosted.sent)


def test_stored_answers_are_no_stored_responses(running: Any, hosted: Hosted) -> None:
    ask(running)
    [id] = [id for id in running.runtime.cache.responses._entries if id.startswith("predicted")]
    asked = len(hosted.server.requests)
    assert httpx.get(f"{running.url}/v1/responses/{id}").status_code == 404
    assert len(hosted.server.requests) == asked


def test_rates_are_bounded_and_need_several_answers() -> None:
    rates = AcceptanceRates()
    for _ in range(MIN_SEEN):
        assert rates.expected(("a",)) == 0.0
        rates.add(("a",), 1.0)
    assert rates.expected(("a",)) == 1.0
    for number in range(5000):
        rates.add((str(number),), 1.0)
    assert rates.expected(("a",)) == 0.0


@pytest.mark.parametrize("messages", [None, [], "x", {}])
def test_bodies_without_messages_are_left_alone(messages: Any) -> None:
    assert not may_predict({"messages": messages})
