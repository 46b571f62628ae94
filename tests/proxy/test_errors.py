from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from agentspec import errors
from agentspec.protocol.wire import event
from agentspec.proxy.errors import error_event, error_response, log_unexpected, outcome

TREE = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.AgentSpecError) and kind is not errors.UpstreamStatusError
]


@pytest.mark.parametrize("kind", TREE)
def test_every_error_has_its_answer(kind: type[errors.AgentSpecError]) -> None:
    needed: dict[str, Any] = {"limit": "tokens_per_minute", "retry_after": 1} if kind is errors.RateLimitError else {}
    error = kind("what went wrong", **needed)
    failed = error_response(error)
    assert failed.status == kind.status and 400 <= failed.status < 600
    body = json.loads(failed.body)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] == "what went wrong" and error_event(error) == event(failed.body)
    assert outcome(error) in ("client_error", "server_error", "rejected")


@pytest.mark.parametrize("kind", [errors.OverloadedError, errors.ShuttingDownError, errors.NotReadyError])
def test_what_may_be_tried_again_says_when(kind: type[errors.AgentSpecError]) -> None:
    assert int(error_response(kind("later")).headers["retry-after"]) >= 1 and outcome(kind("later")) == "rejected"


def test_an_upstreams_error_is_kept_whole() -> None:
    headers = {"retry-after": "3", "set-cookie": "x", "x-should-retry": "false"}
    error = errors.UpstreamStatusError("no", status=418, body=b'{ "error": {"x": 1.10}}', headers=headers)
    failed = error_response(error)
    assert (failed.status, failed.body) == (418, b'{ "error": {"x": 1.10}}')
    assert failed.headers == {"retry-after": "3", "x-should-retry": "false"}
    assert json.loads(error_event(error).removeprefix(b"data: "))["error"]["message"] == "no"


def test_an_upstreams_page_becomes_an_error_object() -> None:
    error = errors.UpstreamStatusError("upstream 'big' answered 503", status=503, body=b"<html>10.0.0.7", headers={})
    failed = error_response(error)
    assert failed.status == 503 and json.loads(failed.body)["error"]["message"] == "upstream 'big' answered 503"


@pytest.mark.parametrize("status", [401, 403])
def test_what_an_upstream_says_about_the_operators_key_stays_here(status: int) -> None:
    body = b'{"error": {"message": "Incorrect API key provided: sk-proj-ab****yz"}}'
    error = errors.UpstreamStatusError("Incorrect API key: sk-proj-ab****yz", status=status, body=body, headers={})
    for failed in (error_response(error), error_response(error)):
        assert failed.status == 502 and failed.code == "upstream_authentication" and b"sk-" not in failed.body
    assert b"sk-" not in error_event(error) and outcome(error) == "server_error"
    error.for_client = True
    assert error_response(error).status == status and outcome(error) == "client_error"


def test_a_bug_says_nothing_about_itself() -> None:
    failed = error_response(ValueError("secret"), "req-7")
    assert failed.status == 500 and b"secret" not in failed.body and outcome(ValueError()) == "server_error"
    assert failed.code == json.loads(failed.body)["error"]["code"] == "internal_error" and b"req-7" in failed.body
    assert error_event(ValueError("secret"), "req-7") == event(failed.body)


def test_a_failure_of_the_engine_leads_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    error = errors.EngineError("the engine failed on this request")
    error.__cause__ = ValueError("secret")
    assert b"request req-7" in error_response(error, "req-7").body and b"req-7" not in error_response(error).body
    with caplog.at_level("ERROR", "agentspec.proxy"):
        log_unexpected(error, "req-7")
        log_unexpected(errors.EngineError("on purpose"), "req-8")
        log_unexpected(errors.InvalidRequestError("theirs"), "req-9")
        log_unexpected(HTTPException(404), "req-9")
    [record] = caplog.records
    assert "req-7" in record.getMessage() and "ValueError" in record.getMessage() and "secret" not in caplog.text


def test_routing_errors() -> None:
    assert error_response(HTTPException(405, headers={"allow": "POST"})).headers == {"allow": "POST"}
    assert json.loads(error_response(HTTPException(418)).body)["error"]["message"] == "I'm a Teapot"
