from __future__ import annotations

import json
from typing import Any

import pytest

from agentspec.protocol.errors import anthropic_error, error_message, error_object, without_account


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
def test_an_answer_that_is_no_error_object_becomes_one(body: bytes, message: str) -> None:
    error = json.loads(error_object(body, 503, "it failed"))["error"]
    code = {"code": "upstream_status", "doc_url": "docs/errors.md#upstream_status"}
    assert error == {"message": message, "type": "upstream_error", "param": None, **code}
    assert json.loads(error_object(body, 404, "it failed"))["error"]["type"] == "invalid_request_error"
    assert json.loads(anthropic_error(body, 502))["error"]["type"] == "api_error"


def test_error_objects_pass_byte_for_byte_without_keys_and_accounts() -> None:
    body = b' {"error" : {"message": "no", "odd": 1.10}, "more": [1e400]}'
    assert error_object(body, 400, "x") is body
    anthropics = b'{"type": "error",  "error": {"type": "x", "message": "y"}}'
    assert anthropic_error(anthropics, 500, "r") == anthropics
    shown = b"key sk-proj-abcd***wxyz of org-AbCdEfGh1234 in proj_AbCdEfGh12: ask-me about tasks"
    assert without_account(shown) == b"key *** of *** in ***: ask-me about tasks"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *((one, "too long") for one in ({"error": {"message": "too long", "code": 400}}, {"error": "too long"})),
        *((one, "too long") for one in ({"object": "error", "message": "too long"}, {"detail": "too long"})),
        *((one, None) for one in (None, [], 3, {}, {"error": {}}, {"error": {"message": 4}}, {"error": []})),
    ],
)
def test_the_message_of_an_error_in_any_form(given: Any, message: str | None) -> None:
    assert error_message(given) == message


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"),
     (408, "invalid_request_error"), (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"),
     (502, "api_error"), (503, "overloaded_error"), (504, "timeout_error"), (529, "overloaded_error")],
)  # fmt: skip
def test_an_error_in_anthropics_form(status: int, kind: str) -> None:
    body = json.dumps({"error": {"message": "no", "type": "x", "param": "a", "code": None}}).encode()
    error = {"type": kind, "message": "no", "param": "a"}
    assert json.loads(anthropic_error(body, status, "r")) == {"type": "error", "error": error, "request_id": "r"}
