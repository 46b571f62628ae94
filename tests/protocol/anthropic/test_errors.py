from __future__ import annotations

import json

import pytest

from agentspec.protocol.anthropic.errors import anthropic_error, error_type


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
