from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.protocol.errors import anthropic_error, error_message, error_object, error_type, without_account


def test_an_error_object_passes_byte_for_byte() -> None:
    body = b' {"error" : {"message": "no", "odd": 1.10}, "more": [1e400]}'
    assert error_object(body, 400, "x") is body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "it failed"),
        (b"<html><center>nginx/1.2 at 10.0.0.7</center></html>", "it failed"),
        (b"[1]", "it failed"),
        (b'{"error": null}', "it failed"),
        (b"[" * 100_000, "it failed"),
        (b"\xff\xfe", "it failed"),
        (b'{"error": {"message": "' + b"x" * (1 << 20) + b'"}}', "it failed"),
        (b'{"error": "model not found"}', "it failed: model not found"),
        (b'{"detail": "Not Found"}', "it failed: Not Found"),
        (b'{"object": "error", "message": "too long", "code": 400}', "it failed: too long"),
        (b'{"detail": [{"loc": ["body"]}]}', "it failed"),
        (b'{"detail": "' + b"x" * 9000 + b'"}', "it failed: " + "x" * 2000),
        (rb'{"detail": "\ud800"}', "it failed: ?"),
    ],
)
def test_everything_else_becomes_one(body: bytes, message: str) -> None:
    error = json.loads(error_object(body, 503, "it failed"))["error"]
    assert error == {"message": message, "type": "upstream_error", "param": None, "code": "upstream_status"}
    assert json.loads(error_object(body, 404, "it failed"))["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "given",
    [
        {"error": {"message": "too long", "code": 400}},
        {"object": "error", "message": "too long", "code": 400},
        {"error": "too long"},
        {"detail": "too long"},
    ],
)
def test_the_message_of_an_error_in_any_form(given: Any) -> None:
    assert error_message(given) == "too long"


@pytest.mark.parametrize("given", [None, [], 3, {}, {"error": {}}, {"error": {"message": 4}}, {"error": []}])
def test_what_has_no_message(given: Any) -> None:
    assert error_message(given) is None


def test_keys_and_accounts_are_taken_out() -> None:
    told = b"key sk-proj-abcd***wxyz of org-AbCdEfGh1234 in proj_AbCdEfGh12: ask-me about tasks"
    assert without_account(told) == b"key *** of *** in ***: ask-me about tasks"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"),
     (408, "invalid_request_error"), (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"),
     (502, "api_error"), (503, "overloaded_error"), (504, "timeout_error"), (529, "overloaded_error")],
)  # fmt: skip
def test_types(status: int, kind: str) -> None:
    assert error_type(status) == kind


def test_an_error_keeps_what_it_tells() -> None:
    body = json.dumps({"error": {"message": "no", "type": "x", "param": "a", "code": None}}).encode()
    expected = {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "no", "param": "a"},
        "request_id": "r",
    }
    assert json.loads(anthropic_error(body, 400, "r")) == expected


def test_an_error_of_its_shape_stays() -> None:
    body = b'{"type": "error",  "error": {"type": "x", "message": "y"}}'
    assert anthropic_error(body, 500, "r") == body


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "no"}', b"[" * 100_000])
def test_what_is_no_error_object_becomes_one(body: bytes) -> None:
    assert json.loads(anthropic_error(body, 502))["error"]["type"] == "api_error"
